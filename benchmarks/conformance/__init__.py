"""Tests of others, run against this package: whatever they hold to be right must come out right.

    python -m benchmarks.conformance opinfo --seconds 600     # go on where the last run stopped
    python -m benchmarks.conformance opinfo --case conv2d     # the groups of that name again
    python -m benchmarks.conformance -o docs/conformance.md   # write the page

A suite is a file here with two functions: `groups()` names its groups of cases, `cases(group)`
makes the cases of one. `judging` asks each verb of the package about a case, in a process of its
own with bounded memory (`worker`); `ledger` keeps what came out, and `page` writes it down.
"""
