"""Training: from text files to checkpoints that the server loads. Heavy imports stay inside the stages."""
