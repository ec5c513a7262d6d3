//! Jobs that want out, and how each ends. In scripts `{agent}` is the process of the agent, `{group}` its process group,
//! `{state}` its state directory, `{token}` the file with its token, `{outside}` a directory that is not the job's.

use std::path::Path;

use crate::fake::Log;

/// The value that all jobs of the corpus must keep to themselves.
pub const SECRET: &str = "s3cr3t-c0rpus-value";
/// A second one, of several lines.
pub const LONG_SECRET: &str = "-----BEGIN KEY-----\nfirst-half-of-it\nother-half-of-it\n-----END KEY-----";

/// What a finished job is looked at with.
pub struct Seen<'a> {
    pub log: &'a Log,
    pub text: &'a str,
    pub strays: u32,
    pub outside: &'a Path,
}

/// One hostile job.
pub struct Case {
    pub name: &'static str,
    /// Its steps.
    pub steps: &'static [&'static str],
    /// `success`, or the reason of the failure.
    pub ends: &'static str,
    /// What its log says, besides.
    pub says: &'static [&'static str],
    /// What its log never says.
    pub never: &'static [&'static str],
    /// Limit of its steps.
    pub timeout_ms: Option<u64>,
    /// It runs only where system calls are filtered: elsewhere it would end the tests and the host.
    pub needs_filter: bool,
    /// More that holds.
    pub holds: fn(&Seen<'_>) -> bool,
}

#[rustfmt::skip]
const PLAIN: Case =
    Case { name: "", steps: &[], ends: "success", says: &[], never: &[], timeout_ms: None, needs_filter: false, holds: |_| true };

/// An output just within the limit of a step; nine are over that of a job.
const MEGABYTE: &str = "(printf k=; head -c 1000000 /dev/zero | tr '\\0' x) >> $KICI_OUTPUT";

/// All of them; the slow ones first.
#[rustfmt::skip]
pub const CASES: &[Case] = &[
    // Time and processes.
    Case { name: "ignores TERM, with a child in a session of its own", ends: "step_timeout", timeout_ms: Some(500),
        steps: &["trap '' TERM; setsid sh -c \"trap '' TERM; sleep 600\" & while :; do sleep 1; done"], ..PLAIN },
    Case { name: "stops itself", ends: "step_timeout", timeout_ms: Some(500), steps: &["kill -STOP $$; echo never"],
        never: &["never"], ..PLAIN },
    Case { name: "many processes in sessions of their own", says: &["up"],
        steps: &["for i in $(seq 200); do setsid sleep 600 > /dev/null 2>&1 & done; echo up"],
        holds: |seen| seen.strays >= 200, ..PLAIN },
    Case { name: "a daemon by double fork", steps: &["(setsid sh -c 'sleep 600 & sleep 600 & touch here' > /dev/null 2>&1 &); while [ ! -e here ]; do sleep 0.01; done; echo up"],
        says: &["up"], holds: |seen| seen.strays >= 2, ..PLAIN },
    Case { name: "a child that holds the output", steps: &["sleep 600 & echo done"], says: &["done"],
        holds: |seen| seen.strays >= 1, ..PLAIN },
    Case { name: "forks again and again", ends: "step_timeout", timeout_ms: Some(1_500),
        steps: &["fork() { [ $1 -gt 0 ] || exec sleep 600; fork $(($1 - 1)) & fork $(($1 - 1)) & wait; }; fork 8"], ..PLAIN },
    Case { name: "waits where no signal but SIGKILL wakes it (state D, by vfork)", ends: "step_timeout", timeout_ms: Some(5_000), says: &["state D"],
        steps: &["printf '#include <unistd.h>\nint main(void) { if (!vfork()) for (;;) pause(); return 0; }' > d.c && cc -w -o d d.c && { ./d & while ! grep -q '^State:.D' /proc/$!/status; do sleep 0.01; done; echo state D; wait; }"], ..PLAIN },
    Case { name: "kills its own group", ends: "step_failed", steps: &["kill -9 0"], ..PLAIN },
    Case { name: "dies of a fault", ends: "step_failed", steps: &["ulimit -c 0; kill -SEGV $$"], says: &["signal 11"], ..PLAIN },
    Case { name: "kills its keeper", steps: &["kill -9 $PPID || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    Case { name: "kills the group of its keeper", steps: &["kill -9 -- -$PPID || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    Case { name: "kills the agent", steps: &["kill -9 {agent} || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    Case { name: "stops the agent", steps: &["kill -STOP {agent} || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    Case { name: "kills the group of the agent", steps: &["kill -9 -- -{group} || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    Case { name: "kills everybody", steps: &["kill -9 -1 || echo refused"], says: &["refused"], needs_filter: true, ..PLAIN },
    // Memory and environment of others.
    Case { name: "reads the environment of the agent", steps: &["cat /proc/{agent}/environ || echo refused"],
        says: &["refused"], never: &["KICI_ORCHESTRATOR_URL"], ..PLAIN },
    Case { name: "reads the memory of the agent, as a tracer would", steps: &["head -c 1 /proc/{agent}/mem || echo refused; cat /proc/{agent}/maps || echo maps refused"],
        says: &["refused", "maps refused"], ..PLAIN },
    Case { name: "reads the memory of its keeper, a copy of the agent's", steps: &["head -c 1 /proc/$PPID/mem || echo refused; cat /proc/$PPID/environ || echo environment refused"],
        says: &["refused", "environment refused"], ..PLAIN },
    Case { name: "looks for settings of the agent", steps: &["env; echo seen"], says: &["seen"],
        never: &["KICI_AGENT_TOKEN", "KICI_ORCHESTRATOR_URL", "KICI_STATE_DIR"], ..PLAIN },
    Case { name: "looks for open descriptors",
        steps: &["for f in /proc/$$/fd/*; do n=${f##*/}; if [ $n -gt 2 ] && [ $n -ne 255 ] && [ -e $f ]; then echo leaked $n; fi; done; echo looked"],
        says: &["looked"], never: &["leaked"], ..PLAIN },
    // Files.
    Case { name: "writes to the host through a link in the workspace", steps: &["ln -s {outside} out; echo x > out/by-link || echo refused"],
        says: &["refused"], holds: |seen| !seen.outside.join("by-link").exists(), ..PLAIN },
    Case { name: "writes to the host", steps: &["echo x > {outside}/direct || echo refused; mkdir {outside}/dir || echo no directory"],
        says: &["refused", "no directory"], holds: |seen| !seen.outside.join("direct").exists(), ..PLAIN },
    Case { name: "writes to the state of the agent", steps: &["echo x >> {state}/jobs.journal || echo no journal; echo x > {state}/outbox/x || echo no outbox; rm -rf {state}/spool || echo no spool"],
        says: &["no journal", "no outbox", "no spool"], ..PLAIN },
    Case { name: "reads the state of the agent", steps: &["cat {state}/jobs.journal || echo refused"], says: &["refused"],
        never: &["accepted"], ..PLAIN },
    Case { name: "reads the file with the token", steps: &["cat {token} || echo refused"], says: &["refused"], ..PLAIN },
    Case { name: "reads the workspace of another job", steps: &["cat {state}/work/other/workspace/file || echo refused"],
        says: &["refused"], never: &["of another job"], ..PLAIN },
    Case { name: "puts a link in the place of its workspace", steps: &["cd /; rm -rf $OLDPWD || echo kept; ln -s {outside} ${OLDPWD}2 || echo refused"],
        says: &["refused"], ..PLAIN },
    Case { name: "leaves a hook for git", steps: &[
            "git init -q . && printf '#!/bin/sh\\necho x > {outside}/by-hook\\n' > .git/hooks/post-commit && chmod +x .git/hooks/post-commit",
            "git -c user.name=n -c user.email=e commit -q --allow-empty -m m; echo committed"],
        says: &["committed"], holds: |seen| !seen.outside.join("by-hook").exists(), ..PLAIN },
    Case { name: "closes its workspace to everybody", steps: &["mkdir -p a/b && touch a/b/c && chmod 000 a/b a && chmod 000 ."], ..PLAIN },
    Case { name: "nests directories", steps: &["for i in $(seq 500); do mkdir d && cd d; done; echo deep"], says: &["deep"], ..PLAIN },
    Case { name: "leaves a large file", steps: &["head -c 100000000 /dev/zero > large; echo there"], says: &["there"], ..PLAIN },
    // The kernel.
    Case { name: "mounts", steps: &["mount -t tmpfs none /mnt || echo refused"], says: &["refused"], ..PLAIN },
    Case { name: "mounts in namespaces of its own", steps: &["unshare -Urm true || echo refused"], says: &["refused"], ..PLAIN },
    Case { name: "gains rights by a set-user-id program", steps: &["grep NoNewPrivs /proc/self/status"], says: &["NoNewPrivs:\t1"], ..PLAIN },
    Case { name: "reads a disk of the host", steps: &["for d in /dev/vda /dev/sda /dev/xvda /dev/nvme0n1 /dev/loop0 /dev/mem; do [ -e $d ] && head -c 1 $d > /dev/null && echo opened $d; done; echo tried"],
        says: &["tried"], never: &["opened"], ..PLAIN },
    Case { name: "writes to a disk of the host", steps: &["for d in /dev/vda /dev/sda /dev/xvda /dev/nvme0n1 /dev/loop0 /dev/mem; do [ -e $d ] && : >> $d && echo opened $d; done; echo tried"],
        says: &["tried"], never: &["opened"], ..PLAIN },
    Case { name: "makes a device of its own", steps: &["mknod disk b 7 0 || echo refused; mknod zero c 1 5 || echo refused too; mkfifo pipe && echo pipes work"],
        says: &["refused", "refused too", "pipes work"], ..PLAIN },
    Case { name: "uses the devices of ordinary programs", steps: &["head -c 8 /dev/urandom > /dev/null && echo sub | cat /dev/stdin > /dev/shm/kici-$$ && cat /dev/shm/kici-$$ && rm /dev/shm/kici-$$ && echo all > /dev/stdout"],
        says: &["sub", "all"], ..PLAIN },
    // Output.
    Case { name: "writes much without a line end", steps: &["head -c 3000000 /dev/zero | tr '\\0' x"],
        holds: |seen| seen.text.bytes().filter(|b| *b == b'x').count() == 3_000_000, ..PLAIN },
    Case { name: "writes bytes that are no text", steps: &["head -c 300000 /dev/urandom; echo; echo end"], says: &["end"], ..PLAIN },
    Case { name: "writes many lines", steps: &["seq 200000"],
        holds: |seen| seen.text.lines().filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).eq(1..=200_000), ..PLAIN },
    Case { name: "closes its output", steps: &["exec 1>&- 2>&-; sleep 0.1; exit 0"], ..PLAIN },
    Case { name: "forges lines of the agent", steps: &["printf 'a\\n1 m forged\\nb\\r1 m forged too\\n'"], says: &[" o 1 m forged\n", " o 1 m forged too\n"],
        never: &["\n1 m forged"], ..PLAIN },
    Case { name: "sends sequences to a terminal", steps: &["printf '\\033]0;title\\007\\033[2J\\033[31mred\\n'; echo after"], says: &["red\n", " o after"],
        holds: |seen| seen.text.lines().all(|line| line.split(' ').nth(1).is_some_and(|channel| ["o", "e", "m"].contains(&channel))), ..PLAIN },
    Case { name: "prints a secret in pieces", steps: &["printf 's3cr3t-c0'; sleep 0.1; printf 'rpus-value\\n'"], says: &["***"], never: &[SECRET], ..PLAIN },
    Case { name: "prints a secret in other forms", steps: &["printf 's3cr3t-c0rpus-value' | base64; printf 'xs3cr3t-c0rpus-value' | base64"],
        says: &["***"], never: &[SECRET, "czNjcjN0LWMwcnB1cy12YWx1", "MzY3IzdC1jMHJwdXMtdmFsd"], ..PLAIN },
    Case { name: "prints a long secret line by line", steps: &["echo first-half-of-it; echo 'and other-half-of-it.'"],
        says: &["***"], never: &["first-half-of-it", "other-half-of-it"], ..PLAIN },
    Case { name: "prints a value that it hid itself", steps: &["printf my-own-s3cr3t | kici mask && echo my-own-s3cr3t", "echo and my-own-s3cr3t"],
        says: &["***", "and ***"], never: &["my-own-s3cr3t"], ..PLAIN },
    Case { name: "hides everything, or more than it may", steps: &["set +e; kici mask e; echo code $?; kici mask $(seq -f value-%.0f 600); echo code $?; echo value-600"],
        says: &["code 2", "code 3", "value-600"], ..PLAIN },
    // What it leaves to later steps.
    Case { name: "exports LD_PRELOAD", steps: &["echo LD_PRELOAD=/evil.so >> $KICI_ENV", "echo \"preload=[$LD_PRELOAD]\""],
        says: &["`LD_PRELOAD` may not be set", "preload=[]"], ..PLAIN },
    Case { name: "exports a PATH that holds nothing, to itself", ends: "step_failed", steps: &["echo PATH=/nothing >> $KICI_ENV", "true"],
        says: &["cannot start"], ..PLAIN },
    Case { name: "exports a name of KiCI", steps: &["echo KICI_SHA=fake >> $KICI_ENV", "echo \"sha=[$KICI_SHA]\""],
        says: &["`KICI_SHA` may not be set"], never: &["sha=[fake]"], ..PLAIN },
    Case { name: "exports too much", steps: &["head -c 2000000 /dev/zero | tr '\\0' x >> $KICI_ENV", "echo goes on"], says: &["larger than 1 MiB", "goes on"], ..PLAIN },
    Case { name: "has outputs over the limit", ends: "step_failed",
        steps: &[MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE, MEGABYTE],
        says: &["its outputs are larger"], ..PLAIN },
    Case { name: "puts a link in the place of its outputs", steps: &["ln -sf {token} $KICI_OUTPUT"], says: &["not a plain file"], ..PLAIN },
    Case { name: "puts a pipe in the place of its outputs", steps: &["rm $KICI_OUTPUT && mkfifo $KICI_OUTPUT"], says: &["not a plain file"], ..PLAIN },
    Case { name: "puts a directory in the place of its summary", steps: &["rm $KICI_SUMMARY && mkdir $KICI_SUMMARY"], says: &["not a plain file"], ..PLAIN },
    // Caches and artifacts. What the agent lets pass nobody takes here: the other side knows none.
    Case { name: "a cache path that climbs, is absolute or a whole home", says: &["code 2"], never: &["code 0", "code 3"],
        steps: &["set +e; mkdir t; for p in ../../x /etc '~' '~/../x' . t/../../x; do kici cache save --key k $p; echo code $?; kici cache restore --key k $p; echo code $?; done"], ..PLAIN },
    Case { name: "an artifact with a name or path that climbs or is absolute", says: &["code 2"], never: &["code 0", "code 3"],
        steps: &["set +e; touch f; for n in ../x /x .. a/b ''; do kici artifact upload \"$n\" f; echo code $?; done; for p in /etc/passwd ../../x '~/x' '{outside}'; do kici artifact upload x \"$p\"; echo code $?; done; kici artifact download x --path ../y; echo code $?"], ..PLAIN },
    Case { name: "a cache and an artifact by way of a link", says: &["code 3"], never: &["code 0", "root:"],
        steps: &["set +e; ln -s /etc e; kici artifact upload x e/passwd; echo code $?; kici cache save --required --key k e/passwd; echo code $?"], ..PLAIN },
];
