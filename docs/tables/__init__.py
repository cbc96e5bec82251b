"""Renders the tables of endpoints, fields and options on the pages from the code: `python -m docs.tables`.

A page says `<!-- table: NAME -->`, the table, `<!-- end -->`. A table is a function of that name, decorated with
`table`, that returns its head and its rows.
"""
