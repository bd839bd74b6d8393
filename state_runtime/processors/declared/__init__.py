"""What a user names in a pipeline and an operator is built from: aggregate functions and windows; pure."""
