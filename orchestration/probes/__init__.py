"""Looking at many jobs at once: a store that hangs, refuses or drips costs its own jobs a look, and nobody else's."""
