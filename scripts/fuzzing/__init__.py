"""Random products against exact integers: what `scripts/fuzz` and `scripts/memory` are made of."""
