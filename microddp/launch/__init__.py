"""Ranks on this machine: started, heard, and ended; and which of them failed first."""

from microddp.launch.echo import is_echo
from microddp.launch.job import Gone, Job, start_server, started
from microddp.launch.rank import Report, tell
from microddp.launch.whole import JobFailed, JobStopped, run
