"""Files on a disk that may be full, lose power, or be shared with another job.

space          space.py          free bytes, and deletion
files          files.py          files that survive a power cut; locks of directories
drafts         drafts.py         a file written in chunks, renamed into place at the end
shared memory  shared_memory.py  memory that processes of one host map
"""
