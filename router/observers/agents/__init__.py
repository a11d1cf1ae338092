"""What agents say of their sessions, and what is done for their next turns."""
