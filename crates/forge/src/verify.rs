//! Does a delivery come from where it says (R3)? Pure; works on the raw bytes.

use std::net::IpAddr;

use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::headers::Headers;
use crate::source::{Source, SourceConfig, Verification};

/// The judgement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verified {
    /// It does.
    Ok,
    /// It does not, or does not prove it. Answer 401; store nothing.
    BadSignature,
    /// The source cannot verify anything. Answer 500 and alert; the text names the remedy.
    Misconfigured(String),
}

/// Header of GitHub's signature.
/// <https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries>
const GITHUB_SIGNATURE: &str = "x-hub-signature-256";

/// Judges a delivery to `source`. `secrets` are all active webhook secrets: every one is tried, always all of them, so
/// that the time taken does not tell which matched. `remote` is the caller's address.
pub fn verify(
    source: &Source,
    secrets: &[SecretString],
    headers: &Headers,
    remote: Option<IpAddr>,
    body: &[u8],
) -> Verified {
    match &source.config {
        SourceConfig::Github(_) => signed(secrets, headers.get(GITHUB_SIGNATURE), body),
        SourceConfig::Generic(config) => generic(&config.verification, secrets, headers, remote, body),
        SourceConfig::Local(_) => {
            if !secrets.is_empty() {
                return signed(secrets, headers.get(GITHUB_SIGNATURE), body);
            }
            // Unsigned calls come from this machine only.
            let local = caller(headers, remote).is_some_and(|ip| ip.to_canonical().is_loopback());
            if local { Verified::Ok } else { Verified::BadSignature }
        }
    }
}

/// The address of the caller. None where a proxy says that it speaks for somebody else: the address is then the proxy's, and
/// what the headers say anybody could write.
fn caller(headers: &Headers, remote: Option<IpAddr>) -> Option<IpAddr> {
    const FORWARDED: [&str; 3] = ["forwarded", "x-forwarded-for", "x-real-ip"];
    remote.filter(|_| FORWARDED.iter().all(|name| headers.get(name).is_none()))
}

fn generic(
    method: &Verification,
    secrets: &[SecretString],
    headers: &Headers,
    remote: Option<IpAddr>,
    body: &[u8],
) -> Verified {
    match method {
        Verification::Hmac { header } => signed(secrets, headers.get(header), body),
        Verification::Token { header } => shown(secrets, headers.get(header)),
        Verification::Bearer {} => shown(secrets, headers.get("authorization").and_then(bearer)),
        Verification::Cidr { allow } if allow.is_empty() => {
            Verified::Misconfigured("no network is allowed; set verification.allow".to_owned())
        }
        Verification::Cidr { allow } => {
            // An IPv4 caller on a dual-stack socket shows as ::ffff:a.b.c.d.
            let inside =
                caller(headers, remote).is_some_and(|ip| allow.iter().any(|net| net.contains(&ip.to_canonical())));
            if inside { Verified::Ok } else { Verified::BadSignature }
        }
        Verification::None { allow_unsigned: true } => Verified::Ok,
        Verification::None { allow_unsigned: false } => Verified::Misconfigured(
            "unsigned calls are not allowed; choose another verification or set allow_unsigned".to_owned(),
        ),
    }
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

fn no_secret() -> Verified {
    Verified::Misconfigured("the source has no webhook secret; set one with `kici-admin source set-secret`".to_owned())
}

fn usable(secrets: &[SecretString]) -> impl Iterator<Item = &[u8]> {
    secrets.iter().map(|s| s.expose_secret().as_bytes()).filter(|s| !s.is_empty())
}

fn signed(secrets: &[SecretString], header: Option<&str>, body: &[u8]) -> Verified {
    if usable(secrets).next().is_none() {
        return no_secret();
    }
    let Some(text) = header.map(str::trim) else { return Verified::BadSignature };
    let hex_text = text.strip_prefix("sha256=").unwrap_or(text);
    let mut given = [0u8; 32];
    if hex::decode_to_slice(hex_text, &mut given).is_err() {
        return Verified::BadSignature;
    }
    let mut matched = false;
    for secret in usable(secrets) {
        // HMAC takes keys of any length, so this arm always holds.
        if let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) {
            mac.update(body);
            matched |= mac.verify_slice(&given).is_ok();
        }
    }
    if matched { Verified::Ok } else { Verified::BadSignature }
}

/// Compares digests, which hides how long the secret is.
fn shown(secrets: &[SecretString], given: Option<&str>) -> Verified {
    if usable(secrets).next().is_none() {
        return no_secret();
    }
    let Some(given) = given else { return Verified::BadSignature };
    let given = Sha256::digest(given.as_bytes());
    let mut matched = subtle::Choice::from(0);
    for secret in usable(secrets) {
        matched |= Sha256::digest(secret).as_slice().ct_eq(given.as_slice());
    }
    if bool::from(matched) { Verified::Ok } else { Verified::BadSignature }
}

/// The signature that a sender puts into `x-hub-signature-256`: `sha256=` and the HMAC-SHA256 of `body` in hex.
pub fn sign(secret: &SecretString, body: &[u8]) -> String {
    match Hmac::<Sha256>::new_from_slice(secret.expose_secret().as_bytes()) {
        Ok(mut mac) => {
            mac.update(body);
            format!("sha256={}", hex::encode(mac.finalize().into_bytes()))
        }
        // HMAC takes keys of any length.
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::SourceId;
    use uuid::Uuid;

    use super::*;
    use crate::source::{GenericConfig, GithubConfig, LocalConfig};

    fn source(config: SourceConfig) -> Source {
        Source { id: SourceId::from_uuid(Uuid::nil()), org: "default".into(), name: "s".into(), version: 1, config }
    }

    fn generic_source(v: Verification) -> Source {
        source(SourceConfig::Generic(Box::new(GenericConfig::new(v))))
    }

    fn secrets(list: &[&str]) -> Vec<SecretString> {
        list.iter().map(|s| SecretString::from(*s)).collect()
    }

    #[test]
    fn signatures() {
        // RFC 4231 test case 2 fixes the algorithm.
        let body = b"what do ya want for nothing?";
        let good = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(sign(&"Jefe".into(), body), format!("sha256={good}"));
        let github = source(SourceConfig::Github(GithubConfig::new(1)));
        let flipped = good.replacen('5', "4", 1);
        let table = [
            (Some(format!("sha256={good}")), Verified::Ok),
            (Some(good.to_owned()), Verified::Ok),
            (Some(good.to_uppercase()), Verified::Ok),
            (Some(format!("sha256={flipped}")), Verified::BadSignature),
            (Some(format!("sha256={}", &good[..62])), Verified::BadSignature),
            (Some(format!("sha256={}", &good[..63])), Verified::BadSignature),
            (Some(format!("sha256={good}00")), Verified::BadSignature),
            (Some(format!("sha1={good}")), Verified::BadSignature),
            (Some("sha256=".to_owned()), Verified::BadSignature),
            (Some("z".repeat(64)), Verified::BadSignature),
            (Some("ä".repeat(32)), Verified::BadSignature),
            (Some(String::new()), Verified::BadSignature),
            (None, Verified::BadSignature),
        ];
        for (value, expected) in table {
            let headers: Headers = value.iter().map(|v| ("X-Hub-Signature-256", v.clone())).collect();
            assert_eq!(verify(&github, &secrets(&["Jefe"]), &headers, None, body), expected, "{value:?}");
            let rotated = secrets(&["Jefe", "new"]);
            assert_eq!(verify(&github, &rotated, &headers, None, body), expected, "rotation, {value:?}");
        }
        let headers = Headers::from_iter([("x-hub-signature-256", good)]);
        assert_eq!(verify(&github, &secrets(&["old", "Jefe"]), &headers, None, body), Verified::Ok);
        assert_eq!(verify(&github, &secrets(&["Jefe"]), &headers, None, b"other"), Verified::BadSignature);
        assert!(matches!(verify(&github, &[], &headers, None, body), Verified::Misconfigured(_)));
        assert!(matches!(verify(&github, &secrets(&[""]), &headers, None, body), Verified::Misconfigured(_)));
    }

    #[test]
    fn tokens_and_bearers() {
        let table = [
            (Verification::Bearer {}, "Authorization", "Bearer t0p", Verified::Ok),
            (Verification::Bearer {}, "Authorization", "bearer t0p", Verified::Ok),
            (Verification::Bearer {}, "Authorization", "t0p", Verified::BadSignature),
            (Verification::Bearer {}, "Authorization", "Bearer t0", Verified::BadSignature),
            (Verification::Bearer {}, "Authorization", "Basic t0p", Verified::BadSignature),
            (Verification::Token { header: "x-gitlab-token".into() }, "X-Gitlab-Token", "t0p", Verified::Ok),
            (Verification::Token { header: "x-gitlab-token".into() }, "X-Gitlab-Token", "", Verified::BadSignature),
            (Verification::Token { header: "x-gitlab-token".into() }, "X-Other", "t0p", Verified::BadSignature),
        ];
        for (method, name, value, expected) in table {
            let headers = Headers::from_iter([(name, value)]);
            let given = verify(&generic_source(method), &secrets(&["old", "t0p"]), &headers, None, b"");
            assert_eq!(given, expected, "{name}: {value}");
        }
    }

    #[test]
    fn networks_and_unsigned_calls() {
        let ip = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let net = |text: &str| Verification::Cidr { allow: vec![text.parse().unwrap()] };
        let none = |allow_unsigned| Verification::None { allow_unsigned };
        let table = [
            (net("10.0.0.0/8"), ip("10.1.2.3"), true),
            (net("10.0.0.0/8"), ip("::ffff:10.1.2.3"), true),
            (net("10.0.0.0/8"), ip("11.1.2.3"), false),
            (net("10.0.0.0/8"), None, false),
            (none(true), ip("8.8.8.8"), true),
        ];
        for (method, remote, ok) in table {
            let given = verify(&generic_source(method), &[], &Headers::default(), remote, b"");
            assert_eq!(given == Verified::Ok, ok, "{remote:?}");
        }
        let refused = verify(&generic_source(none(false)), &[], &Headers::default(), None, b"");
        assert!(matches!(refused, Verified::Misconfigured(_)));

        let local = source(SourceConfig::Local(LocalConfig::new("/x")));
        for (remote, ok) in [("127.0.0.1", true), ("::1", true), ("::ffff:127.0.0.1", true), ("192.0.2.1", false)] {
            let given = verify(&local, &[], &Headers::default(), ip(remote), b"");
            assert_eq!(given == Verified::Ok, ok, "{remote}");
        }
        // A proxy on this machine speaks for somebody else, and a secret that is set is always asked for.
        let forwarded = Headers::from_iter([("X-Forwarded-For", "192.0.2.1")]);
        assert_eq!(verify(&local, &[], &forwarded, ip("127.0.0.1"), b""), Verified::BadSignature);
        assert_eq!(
            verify(&generic_source(net("127.0.0.0/8")), &[], &forwarded, ip("127.0.0.1"), b""),
            Verified::BadSignature
        );
        let unsigned = verify(&local, &secrets(&["k"]), &Headers::default(), ip("127.0.0.1"), b"");
        assert_eq!(unsigned, Verified::BadSignature);
        let signed = Headers::from_iter([("x-hub-signature-256", sign(&"k".into(), b"x"))]);
        assert_eq!(verify(&local, &secrets(&["k"]), &signed, ip("192.0.2.1"), b"x"), Verified::Ok);
    }
}
