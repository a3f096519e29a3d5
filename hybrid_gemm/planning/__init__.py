"""Who does what: boxes, grids, plans and what they cost. Pure."""
