//! Services beside jobs.

use super::*;

fn web(more: Json) -> Json {
    let mut service = json!({"image": {"static": BUSYBOX}});
    merge(&mut service, more);
    service
}

/// The image has no command of its own: a service of tests is what its environment says.
const SERVER: &str = "sleep 0.3; mkdir -p /tmp/www; echo page > /tmp/www/index.html; httpd -f -p 8080 -h /tmp/www";

async fn import(engine: &Engine, name: &str, command: &str) {
    if engine.image(name).await.expect("asked").is_none() {
        let id = format!("CMD {}", serde_json::to_string(&["sh", "-c", command]).expect("JSON"));
        engine.import(name, engine::root_file_system(), &[&id, "ENV PATH=/bin"]).await.expect("imported");
    }
}

async fn reached(kind: &str) {
    let Some(site) = Site::start(kind, &[]).await else { return };
    import(&site.engine, "localhost/kici-test/web:1", SERVER).await;
    let more = json!({"services": {"my-web": web(json!({
        "image": {"static": "localhost/kici-test/web:1"},
        "ports": [{"container": 8080}],
        "health": {"run": "nc 127.0.0.1 8080 < /dev/null", "interval_ms": 50, "retries": 100},
    }))}});
    let get =
        "printf 'GET /index.html HTTP/1.0\\r\\n\\r\\n' | nc $KICI_SERVICE_MY_WEB_HOST $KICI_SERVICE_MY_WEB_PORT_8080";
    let (result, text) = site.run(&[&format!("echo at $KICI_SERVICE_MY_WEB_HOST; {get}")], more.clone()).await;
    assert_eq!(result.state, "success", "{} {text}", result.message);
    says(&text, &["at my-web\n", "200 OK", "page"]);
    says(&site.preparation(&job(2, 1)).await, &["service `my-web` is ready"]);
    site.nothing_left().await;
    // The same beside a job of the host, by a port of the host.
    let bash = "exec 3<>/dev/tcp/$KICI_SERVICE_MY_WEB_HOST/$KICI_SERVICE_MY_WEB_PORT_8080
        printf 'GET /index.html HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3; echo at $KICI_SERVICE_MY_WEB_HOST";
    let (result, text) = site.run_offer(with(offer(&job(3, 1), vec![script(bash)]), more), 1).await;
    assert_eq!(result.state, "success", "{} {text}", result.message);
    says(&text, &["200 OK", "page", "at 127.0.0.1"]);
    site.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_are_healthy_before_the_first_step_and_reached_by_name_or_port_in_docker() {
    reached("docker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_are_healthy_before_the_first_step_and_reached_by_name_or_port_in_podman() {
    reached("podman").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_fails_shows_its_output_and_fails_the_job_before_any_step() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    import(&site.engine, "localhost/kici-test/broken:1", "echo starting; echo no such database >&2; exit 4").await;
    import(&site.engine, "localhost/kici-test/slow:1", "echo waiting for ever; sleep 600").await;
    let service =
        |image: &str, health: Json| json!({"services": {"db": {"image": {"static": image}, "health": health}}});
    let health = json!({"run": "echo not yet; exit 1", "interval_ms": 20, "retries": 3});
    let (result, text) = site.run(&["echo never"], service("localhost/kici-test/broken:1", health.clone())).await;
    assert_eq!((result.state.as_str(), result.reason.as_str(), text.as_str()), ("failed", "sandbox_failed", ""));
    says(&result.message, &["service `db`", "exit code 4", "it said last"]);
    says(&site.preparation(&job(2, 1)).await, &["db | starting", "db | no such database"]);
    let offer = contained(&job(3, 1), vec![script("echo never")], service("localhost/kici-test/slow:1", health));
    let (result, text) = site.run_offer(offer, 1).await;
    assert_eq!((result.reason.as_str(), text.as_str()), ("sandbox_failed", ""));
    says(&result.message, &["not healthy after 3 questions", "not yet", "exit code 1"]);
    says(&site.preparation(&job(3, 1)).await, &["db | waiting for ever"]);
    site.nothing_left().await;
}
