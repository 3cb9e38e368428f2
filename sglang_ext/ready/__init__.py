"""ReaDy: each draft position reads the target's committed recurrent states (Sun et al.)."""
