"""Define meshes, layouts, variables, index arithmetic, and errors. Import no framework and no other package."""
