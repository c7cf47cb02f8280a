"""The modules of ours that stand in graphs, and which modules a graph calls as a whole."""
