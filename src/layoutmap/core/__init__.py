"""Values: meshes, layouts, variables, index arithmetic, errors. No framework, and no import of any other part."""
