"""What would happen: every variable with its layout, what is wrong, what it costs in memory. Pure."""
