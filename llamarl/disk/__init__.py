"""Files on a disk that may be full, cut off from power, or shared with another job.

space          space.py          how much room there is, and deletion
files          files.py          whole after a power cut; directories for one job alone
drafts         drafts.py         a file made in pieces, which takes its place once all are there
shared memory  shared_memory.py  a file without a name, which processes of one host map
"""
