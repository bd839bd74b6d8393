"""Real servers that tests start, kill and start again."""
