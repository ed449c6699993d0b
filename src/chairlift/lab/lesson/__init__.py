"""The lesson: the same requests under static batching, reservations and paging, as a table and as a page."""
