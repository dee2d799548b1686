"""What Rollhouse writes down: tables, views, run configuration and expectations.

Nothing in this room does I/O or imports another room, so a schema can be read, tested and
printed without an engine, a lake or a trainer.
"""
