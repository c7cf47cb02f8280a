"""Tests of others, run against this package: whatever they hold to be right must come out right.

    python -m benchmarks.conformance opinfo --seconds 600     # go on where the last run stopped
    python -m benchmarks.conformance opinfo --case conv2d     # the groups of that name again
    python -m benchmarks.conformance -o docs/conformance.md   # the page, and in the README

A suite is a file here with two functions: `groups()` names its groups of cases, `cases(group)`
makes the cases of one; `VERBS` says what it asks, if not what is usual. `judging` asks each of the
`verbs` about a case, in a process of its own with bounded memory (`worker`); `ledger` keeps what
came out, and `page` writes it down.
"""
