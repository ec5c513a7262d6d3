//! The same questions to every engine: what one of them answers otherwise shows here, not in a job.

mod harness;

use std::path::Path;
use std::time::Duration;

use harness::BUSYBOX;
use kici_containers::{Chunk, Engine, Labels, Owner, first_text};
use serde_json::json;

fn labels(test: &str) -> Labels {
    [("kici-test".to_owned(), format!("{test}-{}", std::process::id()))].into()
}

async fn conforms(engine: Engine) {
    let labels = labels("conforms");
    let name = format!("kici-test-conforms-{}", std::process::id());
    engine.create_network(&name, &labels).await.expect("a network");
    assert!(!engine.has_volume(&name).await.expect("asked"));
    engine.create_volume(&name, &labels).await.expect("a volume");
    engine.create_volume(&name, &labels).await.expect("one that is there is as good");
    assert!(engine.has_volume(&name).await.expect("asked"));
    assert_eq!(engine.image("localhost/kici-test/none:1").await.expect("asked"), None);
    let image = engine.image(BUSYBOX).await.expect("asked").expect("there");
    assert!(image.env.contains(&"OF_IMAGE=there".to_owned()), "{image:?}");

    // What goes in lies there with its new owner before anything runs.
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("file"), "content").expect("written");
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).expect("made");
    let id = engine
        .create(
            &name,
            &json!({
                "Image": BUSYBOX, "User": "1000", "WorkingDir": "/w", "Labels": labels,
                "Entrypoint": ["/bin/sh", "-c", "read line; echo heard $line; ls -ln /w; mkdir /w/own && echo owned; read line; echo err >&2; exit 7"],
                "AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "OpenStdin": true, "StdinOnce": true,
                "HostConfig": {
                    "NetworkMode": name, "CapDrop": ["ALL"], "LogConfig": {"Type": "none"},
                    "Mounts": [{"Type": "volume", "Source": name, "Target": "/w", "VolumeOptions": {"NoCopy": true}}],
                },
            }),
        )
        .await
        .expect("a container");
    engine.fill(&id, "/w", dir.path(), Owner { uid: 1000, gid: 7 }).await.expect("filled");
    let passwd = engine.get(&id, "/etc/passwd").await.expect("asked").expect("there");
    assert!(first_text(&passwd).expect("an archive").contains("ci:x:1000"));
    assert_eq!(engine.get(&id, "/nowhere").await.expect("asked"), None);
    engine.start(&id).await.expect("started");
    let mut attached = engine.attach(&id).await.expect("attached");
    attached.input.write(b"hello\n").await.expect("written");
    let (mut out, mut err) = (String::new(), String::new());
    while !(out.contains("link ->") && out.contains("owned")) {
        match attached.output.next().await.expect("output").expect("not the end") {
            Chunk::Out(bytes) => out += &String::from_utf8_lossy(&bytes),
            Chunk::Err(bytes) => err += &String::from_utf8_lossy(&bytes),
        }
    }
    assert!(out.contains("heard hello") && out.contains("owned") && out.contains("link -> /etc/passwd"), "{out}");
    let file = out.lines().find(|line| line.ends_with(" file")).expect("the file");
    let words: Vec<&str> = file.split_ascii_whitespace().collect();
    assert_eq!(words[2..4], ["1000", "7"], "{file}");
    assert!(engine.inspect(&id).await.expect("looked at").running);
    // The end of the input is heard inside, as at the end of an agent.
    attached.input.close().await;
    while let Some(chunk) = attached.output.next().await.expect("output") {
        if let Chunk::Err(bytes) = chunk {
            err += &String::from_utf8_lossy(&bytes);
        }
    }
    assert_eq!(err, "err\n");
    let limit = tokio::time::Instant::now() + Duration::from_secs(20);
    while engine.inspect(&id).await.expect("looked at").running {
        assert!(tokio::time::Instant::now() < limit, "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(engine.inspect(&id).await.expect("looked at").exit_code, 7);
    engine.kill(&id).await.expect("one that ended is as good");

    services(&engine, &name, &labels).await;

    // Something of somebody else that shares a label: it is neither listed nor removed.
    let mut shared: Labels = labels.clone();
    shared.insert("kici-test-of".to_owned(), "somebody else".to_owned());
    let theirs = format!("{name}-theirs");
    let stranger: Labels = [("kici-test-of".to_owned(), "somebody else".to_owned())].into();
    engine.create_volume(&theirs, &stranger).await.expect("a volume");
    assert!(engine.labelled(&shared).await.expect("listed").is_empty(), "all labels are asked for, not any");
    let left = engine.labelled(&stranger).await.expect("listed");
    assert_eq!(left.volumes, [theirs]);
    assert!(engine.remove(&left).await.failed.is_none());

    let left = engine.labelled(&labels).await.expect("listed");
    assert_eq!((left.containers.len(), left.networks.len(), left.volumes.len()), (2, 1, 1), "{left:?}");
    let removed = engine.remove(&left).await;
    assert!(removed.failed.is_none(), "{removed:?}");
    assert!(engine.labelled(&labels).await.expect("listed").is_empty());
    let again = engine.remove(&left).await;
    assert!(again.failed.is_none(), "what is gone is as good as removed: {again:?}");
}

async fn services(engine: &Engine, network: &str, labels: &Labels) {
    let id = engine
        .create(
            &format!("{network}-svc"),
            &json!({
                "Image": BUSYBOX, "Labels": labels,
                "Entrypoint": ["/bin/sh", "-c", "echo up; mkdir /www; echo page > /www/index.html; httpd -f -p 8080 -h /www"],
                "ExposedPorts": {"8080/tcp": {}},
                "HostConfig": {
                    "NetworkMode": network, "PortBindings": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]},
                    "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
                },
                "NetworkingConfig": {"EndpointsConfig": {network: {"Aliases": ["web"]}}},
            }),
        )
        .await
        .expect("a container");
    engine.start(&id).await.expect("started");
    let limit = Duration::from_secs(20);
    let until = tokio::time::Instant::now() + limit;
    // By its name, through the name server of the network.
    while engine.exec(&id, &["sh", "-c", "nc web 8080 < /dev/null"], limit).await.expect("asked").code != 0 {
        assert!(tokio::time::Instant::now() < until, "it is not reached by its name");
    }
    let failed = engine.exec(&id, &["sh", "-c", "echo out; echo err >&2; exit 3"], limit).await.expect("run");
    assert_eq!(
        (failed.code, failed.output.contains("out"), failed.output.contains("err")),
        (3, true, true),
        "{failed:?}"
    );
    let port = engine.inspect(&id).await.expect("looked at").ports["8080/tcp"];
    let page = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
    assert!(page.is_ok(), "port {port} of the host leads there: {page:?}");
    assert!(engine.logs(&id, 10).await.expect("read").contains("up"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_does_what_is_asked_of_it() {
    if let Some(engine) = harness::engine("docker").await {
        assert_eq!(engine.kind.to_string(), "docker");
        conforms(engine).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn podman_does_what_is_asked_of_it() {
    if let Some(engine) = harness::engine("podman").await {
        assert_eq!(engine.kind.to_string(), "podman");
        conforms(engine).await;
    }
}

#[tokio::test]
async fn an_engine_that_is_not_there_says_where_it_was_looked_for() {
    let error = Engine::connect(Path::new("/nowhere/docker.sock")).await.expect_err("none");
    assert!(error.to_string().contains("/nowhere/docker.sock"), "{error}");
}
