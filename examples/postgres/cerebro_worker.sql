-- Workers of a search inside PostgreSQL: cerebro_worker() makes its session one worker.
--
--     psql -v python=/opt/cerebro/bin/python -f cerebro_worker.sql -d clicks
--     python search_in_postgres.py --uri postgresql:///clicks --sessions 8
--
-- The function starts `cerebro agent` as a child of the session's server process, waits for it, and returns how it
-- ended. Training runs in that child, with the rights of the server's user, on the server's processors. Use it on a
-- server that is yours, if its machine is the one with free processors. Otherwise start agents with ssh or Slurm.
--
-- Dangers:
--
-- - Only a superuser can create the function: plpython3u is an untrusted language. Who may execute it, and has a key,
--   runs any code as the server's user, who owns all files of all databases. Below, nobody else may execute it.
-- - The memory of agents is not limited by any setting of PostgreSQL. If the machine runs out of memory and Linux kills
--   (SIGKILL) one server process, the postmaster ends all other sessions, of all users, and restarts. Killing an
--   agent costs only the agent.
-- - A session is one statement, for the whole search: it takes one of max_connections, and its snapshot keeps vacuum
--   from removing rows that were deleted since it began.
-- - Bind the key as a parameter: the text of a statement is in pg_stat_activity, and in the log if it fails. If you
--   log statements, set log_parameter_max_length to 0 too. The environment of the agent has the key; the server's user
--   and root can read it.
-- - Linux only. Elsewhere, agents would outlive a session that is killed.
--
-- pg_cancel_backend and pg_terminate_backend would have no effect while Python waits. So the function wakes once a
-- second and lets the server look. The agent then hands its states over and leaves; the search goes on without it.
--
-- The extension is in a package of its own: postgresql-plpython3-15 in Debian and Ubuntu (with the server's version),
-- postgresql-plpython3 in Fedora and RHEL. The server's user must be able to execute the Python, and to read its
-- packages and what `build` imports. It need not be the user of the program, whose files it does not write. Data come
-- from the program, over the agent's own connection, into $CEREBRO_CACHE of the server (else ~/.cache/cerebro of its
-- user). Environment variables that affect results must be those of the program: they are those that the server was
-- started with.

\set ON_ERROR_STOP on

create extension if not exists plpython3u;

create or replace function cerebro_worker(hub text, key text) returns text
    language plpython3u
    -- The caller cannot change it.
    set cerebro.python = :'python'
as $python$
import ctypes
import os
import signal
import subprocess

SECONDS = 1.0
PR_SET_PDEATHSIG = 1
MEANINGS = {
    0: "the search has ended",
    1: "it cannot join: see the log of the server",
    2: "no search with this key answers",
    128 + signal.SIGTERM: "it was told to leave",
}

libc = ctypes.CDLL(None)


def end_with_session():
    """Have the agent told to leave if this server process is killed."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


program = plpy.execute("select current_setting('cerebro.python') as program")[0]["program"]
agent = subprocess.Popen(
    [program, "-m", "cerebro", "agent", "--connect", hub],
    env={**os.environ, "CEREBRO_CLUSTER_KEY": key},
    stdin=subprocess.DEVNULL,
    preexec_fn=end_with_session,
    cwd="/",  # not the server's data
)
try:
    has_ended = False
    while not has_ended:
        try:
            agent.wait(SECONDS)
            has_ended = True
        except subprocess.TimeoutExpired:
            pass
        plpy.execute("select 1")  # where the server notices that it is to cancel or to end
finally:
    if agent.poll() is None:
        agent.terminate()
        agent.wait()
return f"{agent.returncode}: {MEANINGS.get(agent.returncode, 'see the log of the server')}"
$python$;

revoke execute on function cerebro_worker(text, text) from public;
