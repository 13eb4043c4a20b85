"""Write a plan or a checkpoint as one page for a browser."""
