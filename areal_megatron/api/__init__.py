"""What scripts and notebooks import, by way of the package itself: runs as objects, and a loop of one's own."""
