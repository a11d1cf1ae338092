"""Next prompts, early: an idle replica computes what is known of a conversation's next prompt."""
