"""Files that nhwc reads, changed by structure, with every checksum right again.

    python -m benchmarks.fuzz --seconds 60
    python -m benchmarks.fuzz --seconds 3600 -o docs/fuzz.md

A process with bounded memory loads one case after the other under an audit hook, which sees every
import, every file that is opened and every program that is started. Each case is refused by a
FileError of one line, or loaded, and shown in every form; anything else is a failure, and so is
whatever a planted text sets off, a process that dies, and a case that takes longer than two
minutes. `--case N` runs one again.
"""
