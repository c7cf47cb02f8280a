"""The machine: processor and versions, time, memory, files kept between runs, other processes."""
