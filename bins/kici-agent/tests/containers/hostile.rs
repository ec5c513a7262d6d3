//! Steps that want out of their container: what each tries, and how it ends.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_17_a_step_in_a_container_sees_nothing_of_the_host_and_has_no_rights() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let text = "set +e; env; id -u; grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
        ls /var/run/docker.sock /run/docker.sock /run/podman 2>&1 | grep -v 'No such file' || echo no engine
        cat /proc/1/environ > /dev/null 2>&1 || echo no environ; cat /proc/1/mem > /dev/null 2>&1 || echo no memory
        (cat < /proc/1/fd/0) > /dev/null 2>&1 || echo no descriptors; (echo x > /proc/1/fd/1) 2> /dev/null || echo no frames
        kill -9 1; kill -STOP 1; echo the first process lives
        echo x > /opt/kici/kici-init || echo the program is read-only; rm -f /opt/kici/kici 2> /dev/null || echo and stays
        mount -t tmpfs none /tmp 2> /dev/null || echo no mount; mknod /tmp/sda b 8 0 2> /dev/null || echo no device
        chown 1000 /etc/passwd 2> /dev/null || echo no chown; su ci -c true 2> /dev/null || echo no other user
        cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2> /dev/null; ps | wc -l";
    let (result, text) = site.run(&[text], json!({})).await;
    assert_eq!(result.state, "success", "{} {text}", result.message);
    says(
        &text,
        &["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "no engine"],
    );
    says(&text, &["no environ", "no memory", "no descriptors", "no frames", "the first process lives"]);
    says(
        &text,
        &["the program is read-only", "and stays", "no mount", "no device", "no chown", "no other user", "4096"],
    );
    let bad = ["KICI_AGENT", "KICI_ORCHESTRATOR", "DOCKER_HOST", &token()];
    assert!(bad.iter().all(|word| !text.contains(word)), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_do_not_see_each_other_and_what_is_asked_for_is_given() {
    let Some(site) = Site::start("docker", &[("KICI_AGENT_MAX_CONCURRENCY", "2")]).await else { return };
    let wait = "echo up; while [ ! -e stop ]; do sleep 0.05; done";
    site.send(contained(&job(2, 1), vec![script(wait)], json!({}))).await;
    site.fake.logged(&job(2, 1), "step-0-0", " o up").await;
    let more = json!({"container": {"options": {"cap_add": ["CHOWN", "SETUID", "SETGID", "FOWNER"], "read_only": true, "shm_bytes": 1 << 20}}});
    let text = "set +e; ps | grep '[s]top' || echo alone; ls -A /workspace | wc -l; ip addr | grep -c 'inet 1[079]'
        touch /tmp/file && chown 1000 /tmp/file && echo chown works; su ci -c 'id -u'; su ci -c 'sleep 600' & sleep 0.1
        touch /bin/x 2> /dev/null || echo read-only; touch /workspace/x && echo workspace works
        dd if=/dev/zero of=/dev/shm/x bs=1M count=2 2> /dev/null || echo shm is small";
    let (result, text) = site.run_offer(contained(&job(3, 1), vec![script(text)], more), 1).await;
    assert_eq!(result.state, "success", "{} {text}", result.message);
    says(&text, &["alone\n0\n1\n", "chown works", "\n1000\n", "read-only", "workspace works", "shm is small"]);
}

/// What each does, its script, how its job ends, what its log says.
const TABLE: &[(&str, &str, &str, &[&str])] = &[
    ("kills its keeper", "kill -9 $PPID; sleep 600", "step_failed", &["killed by signal 9"]),
    (
        "puts a link in the place of its outputs",
        "rm $KICI_OUTPUT; ln -s /etc/passwd $KICI_OUTPUT; echo done",
        "",
        &["not a plain file any more"],
    ),
    (
        "puts a directory in the place of its exports",
        "rm $KICI_ENV; mkdir $KICI_ENV; echo done",
        "",
        &["not a plain file any more"],
    ),
    ("removes all of its files", "rm -f $KICI_OUTPUT $KICI_ENV $KICI_PATH $KICI_SUMMARY $0; echo done", "", &["done"]),
    ("has outputs over the limit", "head -c 2000000 /dev/zero >> $KICI_OUTPUT; echo done", "", &["larger than 1 MiB"]),
    ("closes its streams", "exec > /dev/null 2>&1 0<&-; sleep 0.1", "", &[]),
    ("writes bytes that are no text", "head -c 3000000 /dev/urandom; echo; echo done", "", &["done"]),
    (
        "many processes in sessions of their own",
        "for i in $(seq 300); do setsid sleep 600 > /dev/null 2>&1 & done; echo up",
        "",
        &["up"],
    ),
    ("a child that holds the output", "sleep 600 & echo holds the output", "", &["holds the output"]),
    ("kills everybody", "kill -9 -1; echo never", "step_failed", &["killed by signal 9"]),
    ("removes everything", "rm -rf /workspace/* /tmp/* / 2>/dev/null || true", "", &[]),
    (
        "reads through the root of the first process",
        "ln -s /proc/1 p; cat p/root/etc/shadow 2>/dev/null || echo closed",
        "",
        &["closed"],
    ),
    (
        "prints what looks like frames of the first process",
        "printf '\\0\\0\\0\\005\\005\\0\\0\\0\\0'; printf '\\001\\0\\0\\0\\0\\0\\0\\001x'; echo; echo done",
        "",
        &["done"],
    ),
    (
        "writes noise to the socket of its agent",
        "nc local:/run/kici/call.sock < /dev/zero > /dev/null 2>&1; echo done",
        "",
        &["done"],
    ),
    (
        "calls its agent with the words of its operator",
        "for w in run doctor 'config check' 'git with-write -- id' 'cache save --key k --socket /x y' 'step git token'; do kici $w; echo code $?; done",
        "",
        &["in a container there are", "code 2"],
    ),
    (
        "a cache path that climbs, is absolute or a whole home",
        "for p in ../../x /etc '~' '~/../x' .; do kici cache save --key k $p; echo code $?; done",
        "",
        &["code 2"],
    ),
    (
        "an artifact by way of a link, or out of the workspace",
        "ln -s /etc e; for p in e/passwd /etc/passwd ../etc/passwd; do kici artifact upload x $p; echo code $?; done",
        "",
        &["code 2"],
    ),
];

#[test]
fn the_page_of_the_corpus_lists_every_job_with_its_outcome() {
    let mut table = "| # | the job | ends | its log says |\n|---|---|---|---|\n".to_owned();
    for (at, (name, _, end, says)) in TABLE.iter().enumerate() {
        let says: Vec<String> = says.iter().map(|word| format!("`{}`", page::cell(word))).collect();
        table += &format!("| {} | {name} | {} | {} |\n", at + 1, page::end(end), says.join(", "));
    }
    page::holds("jobs in a container", &table);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_steps_end_as_they_must_and_the_next_job_finds_nothing_of_them() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    for (n, (_, text, reason, words)) in TABLE.iter().enumerate() {
        let job = job(10 + n as u128, 1);
        let step = Step { timeout_ms: Some(20_000), ..script(&format!("set +e\n{text}")) };
        let (result, said) = site.run_offer(contained(&job, vec![step], json!({})), 1).await;
        assert_eq!(result.reason, *reason, "{text}: {} {said}", result.message);
        says(&said, words);
    }
    site.nothing_left().await;
    let (result, text) = site.run(&["set +e; ps | grep -c [s]leep; echo fine"], json!({})).await;
    assert_eq!((result.state.as_str(), text.as_str()), ("success", "0\nfine\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_bomb_stays_within_its_limit_and_ends_with_its_step() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let bomb = Step { timeout_ms: Some(2_000), ..script("b() { b | b & }; b 2> /dev/null; sleep 600") };
    let (result, _) = site.run_offer(contained(&job(2, 1), vec![bomb], json!({})), 1).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "step_timeout"), "{}", result.message);
    site.nothing_left().await;
    let (result, _) = site.run_offer(contained(&job(3, 1), vec![script("true")], json!({})), 1).await;
    assert_eq!(result.state, "success");
}
