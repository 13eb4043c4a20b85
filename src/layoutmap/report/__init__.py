"""Format plans and checkpoints as text, HTML, and JSON."""
