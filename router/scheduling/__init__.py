"""When a request goes: the queue in front of the replicas. Where it goes is a policy's."""
