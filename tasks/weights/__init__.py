"""Weight versions: hashes, anchors and their verification."""
