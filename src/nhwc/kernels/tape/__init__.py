"""Steps: what a kernel is given, where that lies, and the threads that walk a list of them."""
