"""Parts of a pipeline that users declare and operators are built from: aggregate functions and windows; pure."""
