"""Text on its way in: sources as they are declared, at a pinned revision, to documents in a fixed order.

source.py   a source is declared, not coded: sources/NAME.toml -> Source
hub.py      what is asked of the Hugging Face hub, and what a bad answer means
pin.py      which bytes: a source at a revision -> Pinned, a list of files with sizes and hashes
fetch.py    the bytes themselves: there, and the right ones
rows.py     bytes -> documents, from any place on; what is wrong is refused or dropped by a stated rule
"""
