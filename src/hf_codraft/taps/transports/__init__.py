"""Ways for a tap to travel: one file each, and the choice between them."""
