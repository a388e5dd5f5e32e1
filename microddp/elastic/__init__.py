"""Ranks that come and go; the others meet anew, without a restart."""

from microddp.elastic.members import Generation, Members
