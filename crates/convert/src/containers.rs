//! Containers and services, which the systems write in similar ways.

use kici_engine::lock::is_image;
use kici_engine::yaml::Pos;

use crate::target::{Map, Y, job_name};

/// Whether this can be the name of an image; one with expressions is judged when it is known.
pub(crate) fn image(text: &str) -> Result<(), String> {
    if text.contains("${{") || is_image(text) {
        Ok(())
    } else {
        Err(format!("`{text}` is not the name of an image here"))
    }
}

/// A container: the image alone, or with what else is said.
pub(crate) fn container(image: String, from: Pos, more: Map) -> Y {
    if more.0.is_empty() {
        return Y::Text(image);
    }
    let mut out = Map::default();
    out.text("image", from, image);
    out.0.extend(more.0);
    Y::Map(out)
}

/// The name of a service here: a part of a host name.
pub(crate) fn service_name(text: &str, taken: &[String]) -> String {
    job_name(&text.replace('_', "-"), taken)
}

/// The name that a service has by its image: its path without registry, tag and digest.
pub(crate) fn name_of_image(image: &str) -> String {
    let path = image.split('@').next().unwrap_or(image);
    let path = match path.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => path,
        _ => path,
    };
    let mut parts: Vec<&str> = path.split('/').collect();
    if parts.len() > 1 && (parts[0].contains(['.', ':']) || parts[0] == "localhost") {
        parts.remove(0);
    }
    parts.join("-")
}

/// What the health flags of `docker run` ask, as `health`, and whether all flags were of that kind.
pub(crate) fn health(options: &str, from: Pos) -> (Option<Y>, bool) {
    let words = words(options);
    let (mut health, mut whole) = (Map::default(), true);
    let mut at = 0;
    while let Some(word) = words.get(at) {
        at += 1;
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag, value.to_owned()),
            None => {
                let value = words.get(at).cloned().unwrap_or_default();
                at += 1;
                (word.as_str(), value)
            }
        };
        match flag {
            "--health-cmd" => health.text("run", from, value),
            "--health-interval" => match whole_seconds(&value) {
                Some(text) => health.text("interval", from, text),
                None => whole = false,
            },
            "--health-retries" if value.parse::<u32>().is_ok_and(|n| (1..=1000).contains(&n)) => {
                health.put("retries", from, Y::Plain(value));
            }
            // How long one question may take, and from when on answers count: the retries say as much.
            "--health-timeout" | "--health-start-period" | "--health-start-interval" => {}
            _ => whole = false,
        }
    }
    (health.has("run").then_some(Y::Map(health)), whole)
}

fn whole_seconds(text: &str) -> Option<String> {
    let legal = text.strip_suffix(['s', 'm', 'h']).is_some_and(|number| number.parse::<u32>().is_ok_and(|n| n > 0));
    legal.then(|| text.to_owned())
}

/// The words of a line of shell; quotes keep a word together.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quote, mut open) = (String::new(), None, false);
    for c in line.chars() {
        match (quote, c) {
            (None, '"' | '\'') => (quote, open) = (Some(c), true),
            (Some(q), c) if q == c => quote = None,
            (None, c) if c.is_whitespace() => {
                if open {
                    words.push(std::mem::take(&mut word));
                }
                open = false;
            }
            (_, c) => {
                word.push(c);
                open = true;
            }
        }
    }
    if open {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_flags_become_a_question() {
        let (health, whole) = health(
            "--health-cmd \"pg_isready -U x\" --health-interval=10s --health-timeout 5s --health-retries 5",
            Pos::default(),
        );
        assert!(whole);
        let Some(Y::Map(health)) = health else { panic!("no question") };
        assert_eq!(health.get("run"), Some(&Y::Text("pg_isready -U x".into())));
        assert_eq!(health.get("interval"), Some(&Y::Text("10s".into())));
        assert_eq!(health.get("retries"), Some(&Y::Plain("5".into())));
        assert_eq!(super::health("--cpus 1", Pos::default()), (None, false));
    }

    #[test]
    fn services_are_named_after_their_images() {
        for (image, name) in [
            ("postgres:16", "postgres"),
            ("registry.example.com:5000/tutum/wordpress@sha256:1", "tutum-wordpress"),
            ("docker:dind", "docker"),
        ] {
            assert_eq!(name_of_image(image), name);
        }
        assert_eq!(service_name("My_DB", &["my-db".into()]), "my-db-2");
    }
}
