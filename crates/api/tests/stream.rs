//! Server-Sent Events: topics, resuming, gaps.

use std::sync::Arc;

use axum::body::Body;
use http::Request;
use http_body_util::BodyExt;
use kici_access::Role;
use kici_api::testing::Fake;
use tower::ServiceExt;

/// Reads the stream's events until `count` have come: (id, name, data).
async fn events(
    fake: &Arc<Fake>,
    token: &str,
    topics: &str,
    last: Option<&str>,
    count: usize,
    act: impl FnOnce(),
) -> Vec<(String, String, String)> {
    let mut request =
        Request::get(format!("/api/v1/stream?topics={topics}")).header("authorization", format!("Bearer {token}"));
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let response = fake.router().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    act();
    let mut body = response.into_body();
    let (mut text, mut found) = (String::new(), Vec::new());
    while found.len() < count {
        let frame = body.frame().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        while let Some((event, rest)) = text.split_once("\n\n") {
            let field = |name: &str| {
                let value = event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
                value.trim().to_owned()
            };
            found.push((field("id:"), field("event:"), field("data:")));
            text = rest.to_owned();
        }
    }
    found
}

#[tokio::test]
async fn a_stream_shows_its_topics_and_nothing_else() {
    let fake = Fake::new();
    let (run, job) = fake.add_run("demo");
    let (other, other_job) = fake.add_run("demo");
    fake.add_step(job, "step-main-0");
    let token = fake.token(Role::Auditor, None);
    let topics = format!("run:{run},logs:{run}/{job}/step-main-0");
    let found = events(&fake, &token, &topics, None, 4, || {
        fake.add_step(other_job, "step-main-0");
        fake.add_lines(job, "step-main-0", &["one", "two"]);
        fake.end_run(other, true);
        fake.end_run(run, true);
        fake.add_lines(job, "step-main-0", &[]);
        fake.add_step(job, "step-main-1");
    })
    .await;
    let names: Vec<&str> = found.iter().map(|(_, name, _)| name.as_str()).collect();
    assert_eq!(names, ["log.lines", "log.end", "run.status", "step.status"]);
    assert!(found[0].2.contains("\"from_seq\":0") && found[0].2.contains("two"), "{}", found[0].2);
    assert!(found[1].2.contains("completed"));
}

#[tokio::test]
async fn a_stream_resumes_or_says_that_it_cannot() {
    let fake = Fake::new();
    let (run, job) = fake.add_run("demo");
    let token = fake.token(Role::Auditor, None);
    fake.add_step(job, "step-main-0");
    fake.add_step(job, "step-main-1");
    let topic = format!("run:{run}");
    let resumed = events(&fake, &token, &topic, Some("1"), 1, || {}).await;
    assert_eq!((resumed[0].0.as_str(), resumed[0].1.as_str()), ("2", "step.status"));
    let gap = events(&fake, &token, &topic, Some("999"), 1, || {}).await;
    assert_eq!(gap[0].1, "gap");
}
