//! Text of jobs on a terminal.

/// The line without control characters, which could move the cursor or rename the window. Colours stay on a terminal
/// and end with the line.
pub fn for_terminal(text: &str, colour: bool) -> String {
    let mut cleaned = String::with_capacity(text.len());
    let mut coloured = false;
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            '\x1b' => {
                if let Some(sequence) = colour_sequence(&mut rest).filter(|_| colour) {
                    cleaned.push_str(&sequence);
                    coloured = true;
                }
            }
            '\t' => cleaned.push(c),
            c if c.is_control() => {}
            c => cleaned.push(c),
        }
    }
    if coloured {
        cleaned.push_str("\x1b[0m");
    }
    cleaned
}

/// Reads what follows an escape character. Answers the sequence if it sets a colour; any other one is passed over.
fn colour_sequence(rest: &mut std::str::Chars<'_>) -> Option<String> {
    let mut ahead = rest.clone();
    match ahead.next()? {
        // CSI: parameters, then one final byte (ECMA-48, 5.4).
        '[' => {
            let parameters: String = ahead.clone().take_while(|c| ('\x20'..='\x3f').contains(c)).collect();
            let last = ahead.nth(parameters.len())?;
            *rest = ahead;
            (last == 'm').then(|| format!("\x1b[{parameters}m"))
        }
        // OSC: up to BEL or ST.
        ']' => {
            while let Some(c) = ahead.next() {
                if c == '\x07' || (c == '\x1b' && ahead.as_str().starts_with('\\')) {
                    if c == '\x1b' {
                        ahead.next();
                    }
                    break;
                }
            }
            *rest = ahead;
            None
        }
        _ => {
            *rest = ahead;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        for (text, colour, expected) in [
            ("plain\ttext", true, "plain\ttext"),
            ("a\x1b[31mred", true, "a\x1b[31mred\x1b[0m"),
            ("a\x1b[31mred\x1b[0m", false, "ared"),
            ("\x1b[2Jgone\x1b[1;1H", true, "gone"),
            ("\x1b]0;title\x07text", true, "text"),
            ("\x1b]8;;http://x\x1b\\link", true, "link"),
            ("\x1bcreset\r\x08x", true, "resetx"),
            ("end\x1b", true, "end"),
            ("end\x1b[3", true, "end[3"),
        ] {
            assert_eq!(for_terminal(text, colour), expected, "{text:?}");
        }
    }
}
