"""Renders tables on the pages, `python -m docs.tables`: every one of measured figures from the JSON under benchmarks/,
and those of endpoints, fields and options from the code.

A page says `<!-- table: NAME -->`, the table, `<!-- end -->`. A table is a function of that name in one of this
package's modules, decorated with `table`, which returns its head and its rows.
"""
