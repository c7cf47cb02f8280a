"""The documentation as a site: `make docs` writes build/site, `make docs-check` walks it."""
