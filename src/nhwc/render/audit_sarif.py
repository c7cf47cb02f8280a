"""An audit as SARIF 2.1.0, the subset that GitHub's code scanning reads."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .._audit.findings import KINDS
from .._audit.locations import Location
from .._audit.review import Review, Reviewed
from .audit_review import operator, story

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

_BASES = {
    "%SRCROOT%": "The root of the repository.",
    "PACKAGES": "A folder in which Python's packages are installed.",
}
"""Where relative paths begin, by the name that SARIF refers to it by."""

_NAMES = {
    "lost": "FormatLost",
    "misread": "FormatMisread",
    "converted": "ConvertedOnRequest",
    "copies": "CopiesInsideKernel",
    "unconverted": "NeverConverted",
}

_HELP = {
    "lost": "An operator got channels last and returned another format. Later convolutions copy it "
    "back, or run on contiguous data. Give every input of the operator the same format, or use an "
    "operator that keeps it.",
    "misread": "The strides of a tensor fit both formats, as those of one channel or one pixel do, "
    "and code that read them took it for contiguous. Name the format with "
    "`.to(memory_format=torch.channels_last)`.",
    "converted": "The code asks for a contiguous tensor. Drop the call where nothing needs it.",
    "copies": "The operator keeps channels last, and copies its whole input to another layout and "
    "back inside its kernel. Use another operator, or accept its cost.",
    "unconverted": "A weight or an input reaches a convolution contiguous. Convert the model once "
    "with `nhwc.convert_(model)`, and the input with `nhwc.to_format`.",
}


def audit_sarif(review: Review, version: str) -> str:
    """Render one run; `version` is that of the nhwc that made it.

    Results that a baseline knows are marked as unchanged.
    """
    driver = {
        "name": "nhwc",
        "version": version,
        "semanticVersion": version,
        "rules": [_rule(kind) for kind in KINDS],
    }
    run = {
        "tool": {"driver": driver},
        # GitHub keeps the results of several models apart by what stands before the last slash.
        "automationDetails": {"id": f"nhwc audit {review.model}/"},
        "originalUriBaseIds": {
            name: {"description": {"text": text}} for name, text in _BASES.items()
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(review, one) for one in review.findings],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1) + "\n"


def _rule(kind: str) -> dict[str, Any]:
    words = KINDS[kind]
    page = "`nhwc audit MODEL -o page.html` draws the whole run."
    return {
        "id": kind,
        "name": _NAMES[kind],
        "shortDescription": {"text": f"An operator or a tensor {words}."},
        "fullDescription": {"text": _HELP[kind].replace("`", "")},
        "help": {
            "text": f"{_HELP[kind]} {page}".replace("`", ""),
            "markdown": f"{_HELP[kind]} {page}",
        },
        "defaultConfiguration": {"level": "warning" if kind in ("lost", "misread") else "note"},
        "properties": {"tags": ["performance", "memory-format"], "precision": "very-high"},
    }


def _result(review: Review, one: Reviewed) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.finding.kind,
        "ruleIndex": list(KINDS).index(one.finding.kind),
        "level": one.level,
        "message": {"text": f"{operator(one)}: {story(review, one)}"},
        "locations": [_location(review, one)],
        "partialFingerprints": _fingerprints(one),
    }
    if review.baseline:
        result["baselineState"] = "unchanged" if one.known else "new"
    if one.own != one.location and one.location is not None:
        called = {"physicalLocation": _physical(one.location, one.finding.site.source)}
        result["relatedLocations"] = [called | {"message": {"text": "the call"}}]
    return result


def _location(review: Review, one: Reviewed) -> dict[str, Any]:
    if one.own is not None:
        source = one.finding.site.source if one.own == one.location else ""
        physical = _physical(one.own, source)
    else:
        # Code scanning refuses a result without a file: the name of the model stands for it.
        name = quote(os.fsencode(review.model), safe="")
        physical = {"artifactLocation": {"uri": name}, "region": {"startLine": 1}}
    location: dict[str, Any] = {"physicalLocation": physical}
    if one.finding.site.module:
        name = one.finding.site.module
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return location


def _physical(location: Location, source: str) -> dict[str, Any]:
    region: dict[str, Any] = {
        "startLine": location.line,
        "startColumn": location.first_column,
        "endLine": location.line,
        "endColumn": location.last_column,
    }
    if source:
        region["snippet"] = {"text": source}
    if Path(location.path).is_absolute():
        artifact = {"uri": Path(location.path).as_uri()}
    else:
        base = "%SRCROOT%" if location.inside else "PACKAGES"
        artifact = {"uri": quote(os.fsencode(location.path)), "uriBaseId": base}
    return {"artifactLocation": artifact, "region": region}


def _fingerprints(one: Reviewed) -> dict[str, str]:
    """What a result is known again by; GitHub reads the line's hash alone.

    Findings that are shown at the model's definition share its line, but are not the same.
    """
    own = hashlib.sha256(os.fsencode("\n".join(vars(one.key).values()))).hexdigest()[:16]
    shown = one.own if one.own == one.location else None
    return {
        "primaryLocationLineHash": (shown.line_hash if shown else "") or f"{own}:1",
        "nhwcFinding/v1": own,
    }
