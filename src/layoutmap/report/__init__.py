"""Views of a plan: each turns the value into text and computes nothing else."""
