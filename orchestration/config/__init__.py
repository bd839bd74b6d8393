"""`stillstate.yaml`: the desired state of every job, checked completely before anything acts on it."""
