"""Renders the tables of endpoints and fields in docs/*.md from the code: `python -m docs.tables`.

A page has the lines `<!-- table: NAME -->` and `<!-- end -->`, with the table between them. The function of that name,
decorated with `table`, returns its head and rows.
"""
