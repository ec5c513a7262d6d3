use super::*;
use crate::key::{checkout_key, step_key};
use crate::lines::Lines;
use kici_engine::time::Ts;

const AT: Ts = Ts::from_micros(5);
const WIDE: Limits =
    Limits { max_step_bytes: 0, max_unacked_bytes: u64::MAX, pressure: crate::config::Pressure::Pause };

fn lines(text: &str) -> Lines {
    let mut lines = Lines::default();
    text.lines().for_each(|line| lines.say(AT, line));
    lines
}

/// Sends everything there is and acknowledges it; what was sent, by step.
fn drain(spool: &Spool) -> Vec<(String, String)> {
    let mut sent: Vec<(String, String)> = Vec::new();
    loop {
        match spool.next(16, u64::MAX).expect("readable") {
            Next::Data(key, offset, bytes) => {
                spool.ack(&key, offset + bytes.len() as u64, false);
                let text = String::from_utf8(bytes).expect("text");
                match sent.iter_mut().find(|(k, _)| *k == key.kind) {
                    Some((_, all)) => all.push_str(&text),
                    None => sent.push((key.kind, text)),
                }
            }
            Next::Seal(key, seal) => spool.ack(&key, seal.offset, true),
            Next::Wait | Next::Done => return sent,
        }
    }
}

#[tokio::test]
async fn what_is_written_is_sent_once_and_in_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let spool = Spool::create(&dir.path().join("s"), WIDE).expect("made");
    let mut checkout = spool.open(&checkout_key()).await.expect("opened");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    checkout.append(&lines("c")).await.expect("written");
    step.append(&lines("one\ntwo")).await.expect("written");
    assert_eq!(drain(&spool), [("checkout".into(), "5 m c\n".into()), ("step".into(), "5 m one\n5 m two\n".into())]);
    step.append(&lines("three")).await.expect("written");
    assert_eq!(step.close(AT).await.expect("closed").lines, 3);
    checkout.close(AT).await.expect("closed");
    assert_eq!(drain(&spool), [("step".into(), "5 m three\n".into())]);
    spool.close();
    assert!(matches!(spool.next(16, u64::MAX), Ok(Next::Done)));
}

#[tokio::test]
async fn a_log_that_nobody_closes_ends_at_what_was_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let spool = Spool::create(&dir.path().join("s"), WIDE).expect("made");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    step.append(&lines("one\ntwo")).await.expect("written");
    drop(step);
    drop(spool.open(&step_key(1)).await.expect("opened"));
    assert_eq!(drain(&spool), [("step".into(), "5 m one\n5 m two\n".into())]);
    spool.close();
    assert!(matches!(spool.next(16, u64::MAX), Ok(Next::Done)));
}

#[tokio::test]
async fn a_new_upload_starts_at_what_was_acknowledged() {
    let dir = tempfile::tempdir().expect("a directory");
    let spool = Spool::create(&dir.path().join("s"), WIDE).expect("made");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    step.append(&lines("a\nb\nc")).await.expect("written");
    assert!(matches!(spool.next(1 << 20, u64::MAX), Ok(Next::Data(_, 0, bytes)) if bytes.len() == 18));
    spool.ack(&step_key(0), 6, false);
    spool.rewind();
    assert!(matches!(spool.next(1 << 20, u64::MAX), Ok(Next::Data(_, 6, bytes)) if bytes.len() == 12));
    spool.ack(&step_key(0), 0, false);
    assert!(matches!(spool.next(1 << 20, 1), Ok(Next::Data(_, 0, _))), "it lost bytes and gets them again");
    assert!(matches!(spool.next(1 << 20, 1), Ok(Next::Wait)), "the window is used up");
}

#[tokio::test]
async fn complaint_40_over_the_limit_the_head_and_the_newest_lines_stay() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { max_step_bytes: 2_000, ..WIDE };
    let spool = Spool::create(&dir.path().join("s"), limits).expect("made");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    for n in 0..1_000 {
        step.append(&lines(&format!("line {n}"))).await.expect("written");
    }
    let seal = step.close(AT).await.expect("closed");
    let (_, text) = drain(&spool).remove(0);
    assert!(text.starts_with("5 m line 0\n") && text.ends_with("5 m line 999\n"), "{text}");
    let marker = text.lines().find(|line| line.contains("left out")).expect("a marker");
    assert!(marker.contains(&format!("{} lines, {} bytes", seal.missing_lines, seal.missing_bytes)), "{marker}");
    assert_eq!(text.lines().count() as u64, seal.lines);
    assert_eq!(seal.lines - 1 + seal.missing_lines, 1_000);
    assert!(seal.offset <= 2_100, "{}", seal.offset);
}

#[tokio::test(start_paused = true)]
async fn writers_wait_for_acknowledgements() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { max_unacked_bytes: 6, ..WIDE };
    let spool = Spool::create(&dir.path().join("s"), limits).expect("made");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    step.append(&lines("a")).await.expect("written");
    let more = lines("b");
    let blocked = tokio::time::timeout(std::time::Duration::from_secs(60), step.append(&more)).await;
    assert!(blocked.is_err());
    let (written, ()) = tokio::join!(step.append(&more), async { spool.ack(&step_key(0), 6, false) });
    written.expect("written");
    assert_eq!(spool.total_bytes(), 12);
}

#[tokio::test]
async fn what_a_dead_process_left_is_ended_at_a_whole_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    {
        let spool = Spool::create(&path, WIDE).expect("made");
        let mut step = spool.open(&step_key(0)).await.expect("opened");
        step.append(&lines("a\nb")).await.expect("written");
    }
    use std::io::Write as _;
    let mut file = File::options().append(true).open(path.join("step-0-0")).expect("there");
    file.write_all(b"5 o torn").expect("written");
    let spool = Spool::recover(&path, WIDE).expect("recovered");
    assert_eq!(drain(&spool), [("step".into(), "5 m a\n5 m b\n".into())]);
    assert!(matches!(spool.next(16, u64::MAX), Ok(Next::Done)));
    spool.delete();
    assert!(!path.exists());
}

#[tokio::test]
async fn what_does_not_fit_is_left_out_counted_and_said_where_that_is_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { max_unacked_bytes: 20, pressure: crate::config::Pressure::Drop, ..WIDE };
    let spool = Spool::create(&dir.path().join("s"), limits).expect("made");
    let mut step = spool.open(&step_key(0)).await.expect("opened");
    step.append(&lines("one\ntwo\nthree")).await.expect("written");
    step.append(&lines("four\nfive")).await.expect("left out");
    step.append(&lines("six")).await.expect("left out");
    let first = drain(&spool);
    step.append(&lines("seven")).await.expect("written");
    let seal = step.close(AT).await.expect("closed");
    spool.close();
    let sent: String = first.into_iter().chain(drain(&spool)).map(|(_, text)| text).collect();
    let texts: Vec<&str> = sent.lines().filter_map(|line| line.splitn(3, ' ').nth(2)).collect();
    let marker = "[3 lines dropped, 26 bytes: the orchestrator did not take them in time]";
    assert_eq!(texts, ["one", "two", "three", marker, "seven"]);
    assert_eq!((seal.lines, seal.missing_lines, seal.missing_bytes), (5, 3, 26));
}

/// Keeps the value of one gauge.
struct Gauges(Arc<std::sync::atomic::AtomicU64>);

impl metrics::Recorder for Gauges {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn register_counter(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        metrics::Counter::noop()
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::from_arc(Arc::clone(&self.0))
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

#[tokio::test]
async fn a_log_that_nobody_waits_for_any_more_is_not_counted_as_held_back() {
    let held_back = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let gauges = Gauges(Arc::clone(&held_back));
    let _guard = metrics::set_default_local_recorder(&gauges);
    let now = || f64::from_bits(held_back.load(std::sync::atomic::Ordering::SeqCst));
    let dir = tempfile::tempdir().expect("a directory");
    let spool = Spool::create(&dir.path().join("s"), Limits { max_unacked_bytes: 1, ..WIDE }).expect("made");
    let mut log = spool.open(&step_key(0)).await.expect("opened");
    log.append(&lines("one")).await.expect("there was room");
    let two = lines("two");
    let mut waits = Box::pin(log.append(&two));
    assert!(futures::poll!(&mut waits).is_pending());
    assert!((now() - 1.0).abs() < f64::EPSILON);
    drop(waits);
    assert!(now().abs() < f64::EPSILON);
}
