"""Data Docs: what the gates found, as pages that a browser reads offline."""
