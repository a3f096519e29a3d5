"""How matrices lie in memory and in files; matrices made from a seed."""
