"""Plans: every variable with its layout, its problems, and its memory. Pure."""
