"""Renders every table of measured figures on the pages from the JSON under benchmarks/: `python -m docs.tables`.

A page says `<!-- table: NAME -->`, the table, `<!-- end -->`. A table is a function of that name in one of this
package's modules, decorated with `table`, which returns its head and its rows.
"""
