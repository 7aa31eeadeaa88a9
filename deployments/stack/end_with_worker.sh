#!/bin/sh
# Start the process of a flow run, as Python, so that it ends with its worker; see prefect_worker.py.
#
# From its first moment on, the kernel sends the process SIGTERM when its worker ends, by whatever.
exec setpriv --pdeathsig TERM -- "$LAKEVISION_WORKER_PYTHON" "$@"
