"""Questions to the nodes of a graph, and small changes to them."""
