"""Verbs that export tapes to other formats and import traces of other systems as tapes."""
