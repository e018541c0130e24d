"""Answers that are known to be equal or unequal, one kind of answer a line, and answers to questions.

Parts of a line are separated by " ~ ".
"""

# ruff: noqa: E501

EQUAL = [
    line.split(" ~ ")
    for line in r"""
12 cm ~ 12 centimeters ~ 12 \text{ cm} ~ 12
75 ~ 75\text{ (km)}
\{75\} ~ 75 ~ x\in\{75\}
f^{(2)}(x)=2x ~ f''(x)=2x ~ f^{(2)}(x)=x\cdot2
f^{(n)}(x) ~ f^{(n)} (x)
A^{-1}B ~ A^{-1} B
\vec{a}\times\vec{b} ~ \vec a \times \vec b ~ \vec{a} \times \vec{b}
f\circ g ~ f \circ g
15 mins ~ 15 minutes ~ 15\text{ min}
5 \text{ red apples} ~ 5 \text{ apples} ~ 5
60 mph ~ 60 miles per hour ~ 60 \text{ mi/h}
12 \text{ sq. units} ~ 12 \text{ square units} ~ 12 units
n \equiv 1 \pmod{4} ~ n\equiv 1\pmod 4 ~ n \equiv 1 (\text{mod } 4) ~ n\equiv1\mod 4 ~ n \equiv -3 \pmod 4 ~ 1 \pmod 4 ~ n ≡ 1 (mod 4)
\text{All primes } p \equiv 1 \pmod 4 ~ \text{all primes }p\equiv 1 \pmod{4}
1, 2, \ldots, n ~ 1,2,\dots,n ~ 1, 2, ..., n ~ 1,2,…,n ~ \{1,2,\ldots,n\}
2, 4, \ldots, 2n ~ 2,4,\dots,n\cdot 2
1+2+\cdots+n ~ 1 + 2 + \dots + n ~ 1+2+...+n
1:2:3 ~ 1 : 2 : 3
5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd} ~ 5 \text{ if $n$ is even, } 6 \text{ if } n \text{ is odd} ~ 6 \text{ if } n \text{ is odd}, 5 \text{ if } n \text{ is even} ~ 5 \text{ if n is even}, 6 \text{ if n is odd} ~ 5 if n is even, 6 if n is odd
\begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases} ~ \begin{cases}1&x>0\\0&x\leq 0\end{cases} ~ \begin{cases} 1, & x>0 \\ 0, & x \leqslant 0 \end{cases} ~ \begin{cases} 0 & x\le 0 \\ 1 & x>0\end{cases} ~ \begin{cases} 1 & \text{if } x>0 \\ 0 & \text{if } x\le 0\end{cases}
\begin{cases} 1 & \text{if } n \text{ is even} \\ \frac12 & \text{otherwise}\end{cases} ~ \begin{cases} 1, & \text{if } n \text{ is even}, \\ 0.5, & \text{otherwise}. \end{cases}
f(x)=x, f(x)=0 ~ f(x)=0, f(x)=x ~ f(x)=x \text{ or } f(x)=0 ~ f(x)=0 \text{ and } f(x)=x ~ x, 0 ~ f(x) = x\text{ and }f(x) = 0
f(x)=2x+1 ~ 2x+1 ~ f(x) = 1+2x ~ y=2x+1
a=1, b=2 ~ b=2,a=1 ~ 1, 2 ~ (1,2) ~ a = 1 \text{ and } b = 2
x=2 \text{ or } x=3 ~ x=3,x=2 ~ 2,3 ~ 3, 2 ~ \{2,3\} ~ x \in \{2,3\} ~ x = 2, 3
x=\pm 2 ~ \pm 2 ~ 2,-2 ~ -2, 2 ~ x=2 \text{ or } x=-2 ~ x = -2, x=2
(1,2),(3,4) ~ (3,4), (1,2) ~ (1,2) \text{ and } (3,4) ~ \{(1,2),(3,4)\}
x+y=3, x-y=1 ~ x-y=1, x+y=3 ~ y+x=3,x-y=1
(-\infty, 3) ~ x<3 ~ x \in (-\infty,3) ~ 3>x ~ \left(-\infty,3\right)
(-\infty,-\sqrt2)\cup(\sqrt2,\infty) ~ x<-\sqrt2 \text{ or } x>\sqrt2 ~ x>\sqrt2, x<-\sqrt2
(-\sqrt2,\sqrt2) ~ x>-\sqrt2 \text{ and } x<\sqrt2 ~ -\sqrt2<x<\sqrt2
[1,2] ~ 1\le x\le 2 ~ x\in[1,2] ~ 2 \ge x \geq 1
(1,2] ~ 1<x\le 2 ~ x\in (1,2]
x<1 \text{ or } x>2 ~ (-\infty,1)\cup(2,\infty) ~ x \in (2,\infty)\cup(-\infty,1) ~ x>2 \text{ or } x<1
\mathbb{R} ~ (-\infty,\infty) ~ x\in\mathbb{R} ~ \Bbb{R}
x\ne 0 ~ x \neq 0 ~ (-\infty,0)\cup(0,\infty) ~ \mathbb{R}\setminus\{0\}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ~ (1,2) ~ \langle 1,2 \rangle
\frac{1}{5}\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1/5&2/5\\3/5&4/5\end{pmatrix} ~ \begin{pmatrix}0.2&0.4\\0.6&0.8\end{pmatrix}
3\frac12 ~ 3.5 ~ \frac72 ~ 7/2 ~ 3 1/2
50\% ~ 0.5 ~ 50 ~ \frac12 ~ 50 \%
90^\circ ~ 90 ~ 90^{\circ} ~ 90°
30^\circ, 60^\circ ~ 60^\circ, 30^\circ ~ 30,60 ~ 30°, 60°
1.5\times10^{8} ~ 150000000 ~ 150,000,000 ~ 1.5e8 ~ 1.5 \cdot 10^8
0.\overline{3} ~ 1/3 ~ \frac13 ~ 0.\dot{3} ~ 0.\bar{3} ~ 0.(3)
0.1\overline{6} ~ \frac16 ~ 0.1\dot{6} ~ 0.1\bar 6
0.\overline{142857} ~ \frac17 ~ 0.\dot{1}4285\dot{7}
42 ~ (42) ~ \left(42\right) ~ 42{} ~ {42} ~ {}42 ~ \boxed{42} ~ \text{42} ~ (42). ~ +42
\sqrt{2} ~ 2^{1/2} ~ 2^{0.5} ~ \sqrt2 ~ √2 ~ sqrt(2) ~ \frac{2}{\sqrt{2}} ~ 2^{\frac{1}{2}}
\frac{\sqrt{3}}{3} ~ \frac{1}{\sqrt{3}} ~ \sqrt{3}/3 ~ \frac{1}{3}\sqrt{3} ~ \frac13 \sqrt 3
\pi ~ π ~ pi
\frac{\pi}{6} ~ π/6 ~ \frac{1}{6}\pi ~ pi/6
e^{2x} ~ (e^x)^2 ~ e^{x\cdot 2}
\ln 3 ~ \ln{3} ~ \log_e 3 ~ \ln(3)
2\ln 3 ~ \ln 9 ~ 2 \ln{3}
\log_2 3 ~ \frac{\ln 3}{\ln 2} ~ \log_{2}(3) ~ \frac{\log 3}{\log 2}
\log_{10} 2 ~ \log 2 ~ \lg 2
\sin 2x ~ 2\sin x\cos x ~ \sin(2x) ~ \sin{2x}
\tan x ~ \frac{\sin x}{\cos x}
\cos^2 x ~ (\cos x)^2 ~ 1-\sin^2 x ~ \cos^{2}(x)
\arctan 2 ~ \tan^{-1} 2 ~ \tan^{-1}(2) ~ arctan(2) ~ \arctan(2)
\sqrt[3]{2} ~ 2^{1/3} ~ \sqrt[3]2 ~ 2^{\frac13}
\sqrt{5}-1 ~ -1+\sqrt5 ~ -(1-\sqrt{5})
1-\sqrt{2}, 1+\sqrt{2} ~ 1\pm\sqrt2 ~ 1+\sqrt2,1-\sqrt2 ~ x = 1 \pm \sqrt{2} ~ \{1-\sqrt2, 1+\sqrt2\}
\frac{-1\pm\sqrt{5}}{2} ~ \frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2} ~ -\frac12\pm\frac{\sqrt5}{2}
\frac{3+i}{2} ~ \frac32+\frac12 i ~ 1.5+0.5i ~ \frac{3}{2}+\frac{i}{2}
1+2i, 1-2i ~ 1\pm 2i ~ 1 - 2i, 1+2i
10^{20}+1 ~ 100000000000000000001 ~ 1+10^{20}
2^{100} ~ 1267650600228229401496703205376 ~ 2^{100}
2^{n+1} ~ 2\cdot 2^n ~ 2^{1+n}
(-1)^n ~ (-1)^{n}
n! ~ n!
\frac{n!}{2} ~ n!/2 ~ \frac12 n!
\binom{n}{2} ~ \frac{n(n-1)}{2} ~ \binom n2
\frac{n(n+1)}{2} ~ \frac{n^2+n}{2} ~ \frac12 n(n+1) ~ n(n+1)/2
x^2+2x+1 ~ (x+1)^2 ~ 1+2x+x^2 ~ (1+x)^2 ~ (x+1)(x+1)
(x-2)(x-3) ~ x^2-5x+6 ~ (x-3)(x-2) ~ (2-x)(3-x)
\frac{x}{y} ~ x/y ~ xy^{-1} ~ \dfrac{x}{y}
\frac{1}{x+1} ~ 1/(x+1) ~ (x+1)^{-1} ~ \frac{1}{1+x}
|x-1| ~ \left|x-1\right| ~ \lvert x-1\rvert ~ |1-x|
\sqrt{x^2+y^2} ~ (x^2+y^2)^{1/2} ~ \sqrt{y^2+x^2}
y = \frac{1}{2}x + 3 ~ y=0.5x+3 ~ y=\frac{x}{2}+3 ~ y = x/2+3
x^2+y^2=25 ~ y^2+x^2=25 ~ x^2+y^2-25=0 ~ 25=x^2+y^2
2x+3y=6 ~ 3y+2x=6 ~ 2x+3y-6=0 ~ 4x+6y=12
x > 3 ~ 3<x ~ (3,\infty) ~ x\in(3,\infty)
x+y \le 4 ~ 4 \ge x+y ~ y+x\leq 4
\text{odd} ~ odd ~ Odd
\text{no solution} ~ No solution ~ \text{No solution.}
\text{true} ~ True
\emptyset ~ \varnothing ~ \{\} ~ ∅
12\pi \text{ cm}^2 ~ 12\pi ~ 12\pi\text{ square centimeters} ~ 12 \pi \, \text{cm}^2
2\sqrt{3} \text{ m} ~ 2\sqrt3
5 \text{ cm} ~ 5 ~ 5cm ~ 5 \text{ centimeters}
\$5.50 ~ 5.5 ~ 5.50 ~ \$5.5
1:2 ~ 1 : 2
3:4:5 ~ 3 : 4 : 5
(0,0,1) ~ (0, 0, 1) ~ \left(0,0,1\right)
x_1 + x_2 ~ x_{1}+x_{2} ~ x_2+x_1
a_n = 2n-1 ~ 2n-1 ~ a_{n}=2n-1
\alpha+\beta ~ \beta+\alpha ~ α+β
\frac{a+b}{c} ~ (a+b)/c ~ \frac{a}{c}+\frac{b}{c}
\{x \mid x>0\} ~ \{x : x > 0\} ~ \{ x | x>0 \}
\{(1,2)\} ~ (1,2)
2^{\sqrt{2}} ~ 2^{\sqrt2}
\sqrt{2+\sqrt{3}} ~ \frac{\sqrt6+\sqrt2}{2} ~ \sqrt{2 + \sqrt 3}
\sqrt{6}-\sqrt{2} ~ -\sqrt2+\sqrt6
1e-12x ~ 1e-12x
\frac{1}{2}, -\frac{1}{3} ~ 0.5, -\frac13 ~ -1/3, 1/2 ~ x=\frac12, x=-\frac13
(2,3) ~ x=2, y=3 ~ 2,3 ~ (x,y)=(2,3)
\left(\frac12,\frac{\sqrt3}{2}\right) ~ (1/2, \sqrt{3}/2) ~ (0.5,\frac{\sqrt{3}}{2})
\infty ~ +\infty ~ ∞ ~ inf
-\infty ~ -∞
k\pi, k\in\mathbb{Z} ~ k \pi, k \in \mathbb{Z} ~ \pi k, k\in \mathbb Z
x = \frac{\pi}{2} + k\pi ~ x=k\pi+\frac{\pi}{2} ~ \frac{\pi}{2}+\pi k
p^2q ~ qp^2 ~ q p^{2}
3x^{2}y ~ 3yx^2 ~ 3 \cdot x^2 \cdot y
-x ~ -1x ~ - x
\frac{-x+1}{2} ~ \frac{1-x}{2} ~ -\frac{x-1}{2}
100! ~ 100!
42 ~ 42\hspace{1cm} ~ \mbox{42} ~ 42\, ~ \large 42 ~ {\large 42} ~ \color{red}{42} ~ \textcolor{red}{42} ~ \underline{42} ~ \emph{42} ~ \boxed{42} ~ \fbox{42} ~ 42\degree ~ =42 ~ x=42 ~ \quad 42 ~ 42\text{ } ~ {\bf 42} ~ \bf 42 ~ \mathsf{42} ~ \mathtt{42} ~ \texttt{42} ~ \textsf{42} ~ \operatorname{42} ~ \boldsymbol{42} ~ \bm{42} ~ \ensuremath{42} ~ \left(42\right) ~ \bigl(42\bigr) ~ \big(42\big) ~ (\,42\,) ~ (42)\text{ cm} ~ (42) cm ~ 42 \text{.} ~ \text{ 42 } ~ \text{42 cm} ~ \,42\, ~ \;42 ~ \phantom{}42 ~ 42\phantom{x} ~ \$ 42 ~ \textdollar 42 ~ USD 42 ~ 42 USD ~ £42 ~ €42 ~ \pounds 42 ~ 42\! ~ 42{}{} ~ {{42}} ~ \textstyle 42 ~ \scriptstyle 42 ~ \mathit{42} ~ \mathbf{42.0} ~ 42\mathrm{~cm} ~ 42\,\text{cm}^{2} ~ 42\ \mathrm{cm}^2 ~ 42~\mathrm{m/s} ~ 42\ \text{units}^2 ~ \rm 42 ~ \mathrm{42\,cm} ~ \text{\$42} ~ \mathbf{\$42} ~ $42$ ~ \(42\) ~ \[42\] ~ **42** ~ 42\\ ~ \displaystyle{42} ~ \left. 42 \right. ~ 42\mathrm{th} ~ 42nd ~ 42^\text{nd} ~ \therefore 42 ~ \mathopen{}42 ~ 42\mathclose{} ~ 42\par ~ \hfill 42 ~ \!42 ~ \;\;42 ~ 0042 ~ 42.000 ~ 4.2\times 10^{1} ~ +42.
\frac12 ~ \nicefrac{1}{2} ~ \sfrac{1}{2} ~ {1}/{2} ~ {1\over 2} ~ ½ ~ 1⁄2 ~ (0.5) ~ \frac{{1}}{{2}} ~ \left(\frac{1}{2}\right)
-42 ~ -(42) ~ (-42) ~ −42 ~ –42 ~ \left(-42\right)
\lfloor n/2 \rfloor ~ \left\lfloor \frac{n}{2} \right\rfloor
\triangle ABC ~ \triangle ABC
\text{A and B} ~ A and B
\sum_{k=1}^n k^2 ~ \sum_{k=1}^{n} k^2
\int_0^1 f(x)\,dx ~ \int_0^1 f(x) dx
\overline{AB} ~ \overline{AB}
x=1,y=2,z=3 ~ (1,2,3) ~ 1,2,3 ~ z=3,y=2,x=1
(a,b,c)=(1,2,3) ~ (1,2,3) ~ a=1,b=2,c=3
\{1,2\}\cup\{5\} ~ \{1,2\} \cup \{5\}
n=4k+1 ~ n = 1+4k
\frac{dy}{dx}=2x ~ 2x
f^{-1}(x)=\frac{x-1}{2} ~ \frac{x-1}{2} ~ f^{-1}(x) = (x-1)/2
f'(x)=2x ~ 2x ~ f'(x) = x\cdot 2
1000000 ~ 1{,}000{,}000 ~ 1,000,000 ~ 1e6
\frac{3}{8} ~ .375 ~ 3/8 ~ 37.5\%
\frac{n^2(n+1)^2}{4} ~ \left(\frac{n(n+1)}{2}\right)^2 ~ \frac14 n^2(n+1)^2
\frac{x^{2}-1}{x^2+1} ~ 1-\frac{2}{x^2+1}
3+2\sqrt{2} ~ 2\sqrt2+3 ~ 3 + \sqrt{8}
\frac{5\pm\sqrt{13}}{2} ~ \frac{5+\sqrt{13}}{2}, \frac{5-\sqrt{13}}{2} ~ \frac{5}{2}\pm\frac{\sqrt{13}}{2} ~ x=\frac{5\pm\sqrt{13}}{2}
\cos\theta ~ \cos(\theta) ~ \cos{\theta}
2\cos^2\theta-1 ~ \cos 2\theta ~ \cos(2\theta)
(x+2y)(x-2y) ~ x^2-4y^2
\frac{a}{b+c} ~ a/(b+c) ~ a(b+c)^{-1}
x^{3/2} ~ x\sqrt{x} ~ \sqrt{x^3} ~ x^{1.5}
\sqrt{\frac{2}{3}} ~ \frac{\sqrt6}{3} ~ \frac{\sqrt{2}}{\sqrt{3}}
e^{-x} ~ \frac{1}{e^x} ~ 1/e^x
\frac{1}{2}\ln 2 ~ \frac{\ln 2}{2}
-\frac{\sqrt{3}}{2} ~ \frac{-\sqrt{3}}{2} ~ -\sqrt3/2
(4,-3) ~ (4, -3) ~ \left( 4 , -3 \right) ~ x=4,y=-3
\left[-\frac12,\frac12\right] ~ [-1/2,1/2] ~ -\frac12\le x\le\frac12 ~ [-0.5,0.5]
[0,1)\cup(2,3] ~ (2,3]\cup[0,1)
(-\infty,-1]\cup[1,\infty) ~ x\le-1 \text{ or } x\ge 1 ~ x\leq -1, x\geq 1 ~ x\in(-\infty,-1]\cup[1,+\infty)
\{-1,0,1\} ~ -1,0,1 ~ \{0,\pm1\} ~ 0, \pm 1
x=-1,0,1 ~ -1, 0, 1 ~ x=0,x=1,x=-1
y=-\frac{2}{3}x+4 ~ y=4-\frac{2x}{3} ~ y = -\frac23 x + 4
(x-1)^2+(y+2)^2=9 ~ (y+2)^2+(x-1)^2=9 ~ 9=(x-1)^2+(y+2)^2
\frac{x^2}{9}+\frac{y^2}{4}=1 ~ \frac{y^2}{4}+\frac{x^2}{9}=1 ~ 4x^2+9y^2=36
a_n=2^n-1 ~ 2^n-1 ~ a_n = -1+2^n
n\equiv 1,3\pmod 8 ~ n \equiv 1,3 \pmod{8}
x\equiv 2\pmod{5} ~ x\equiv2\pmod5 ~ x \equiv -3 \pmod 5
120^\circ ~ 120 ~ 120° ~ 120\text{ degrees}
\text{Monday} ~ Monday ~ monday
\text{Yes} ~ yes ~ \text{yes}
6.022\times10^{23} ~ 6.022e23 ~ 6.022 \cdot 10^{23}
\$1{,}234.50 ~ 1234.5 ~ 1,234.50 ~ \$1,234.50
2:30 ~ 2:30
2\frac{3}{4} ~ 2.75 ~ \frac{11}{4} ~ 11/4
-2\frac{3}{4} ~ -2.75 ~ -\frac{11}{4}
\frac{1}{3},\frac{2}{3} ~ 1/3, 2/3 ~ \frac23,\frac13
\begin{pmatrix} a & b \\ c & d\end{pmatrix} ~ \begin{bmatrix}a&b\\c&d\end{bmatrix} ~ \left(\begin{array}{cc} a & b \\ c & d \end{array}\right)
\begin{pmatrix} 1/2 \\ -1 \end{pmatrix} ~ \begin{pmatrix}\frac12\\-1\end{pmatrix} ~ \begin{pmatrix}0.5\\-1\end{pmatrix}
\mathbf{i}+2\mathbf{j} ~ \mathbf{i} + 2\mathbf{j} ~ 2\mathbf j+\mathbf i
x^2+xy+y^2 ~ y^2+xy+x^2 ~ x^2+yx+y^2
p=2, q=3 ~ q=3, p=2 ~ (p,q)=(2,3) ~ p=2\text{ and }q=3 ~ 2, 3
(p,q)=(2,3) ~ p=2,q=3 ~ (2,3)
10\sqrt{2}\text{ units} ~ 10\sqrt2 ~ 10\sqrt{2} \text{ units}
\sqrt{2}:1 ~ \sqrt2 : 1
1:\sqrt{3}:2 ~ 1 : \sqrt3 : 2
f(x)=\begin{cases}x&x\ge0\\-x&x<0\end{cases} ~ \begin{cases}x&x\ge0\\-x&x<0\end{cases} ~ f(x)=\begin{cases} x, & x \geq 0, \\ -x, & x < 0. \end{cases}
\begin{cases} x=1 \\ y=2 \end{cases} ~ x=1, y=2 ~ (1,2)
n \text{ is even} ~ n\text{ is even} ~ n is even ~ \text{n is even}
\text{all even } n ~ \text{all even n} ~ all even n
\text{all real numbers} ~ \text{All real numbers} ~ all real numbers
1, \frac12, \frac14, \ldots ~ 1, 0.5, 0.25, \dots
x_1, x_2, \ldots, x_n ~ x_1,x_2,\dots,x_n
1 \cdot 2 \cdot 3 \cdots n ~ 1\cdot2\cdot3\cdots n
a_1 + a_2 + \cdots + a_n ~ a_1+a_2+\dots+a_n
n>5 ~ 5<n ~ n \gt 5
2 < x < 5 ~ (2,5) ~ 5>x>2 ~ x \in (2,5)
x \ge 2 \text{ and } x < 5 ~ 2\le x<5 ~ [2,5)
k \in \mathbb{Z} ~ k\in\mathbb Z
\frac{(2n)!}{n!} ~ \frac{(2n)!}{n!} ~ (2n)!/n!
\binom{2n}{n} ~ \binom{2n}{n}
\overline{z} ~ \bar z
\log_{3}{5} ~ \log_3 5
\log x^2 ~ 2\log x
\sin\frac{\pi}{5} ~ \sin(\pi/5) ~ \sin 36^\circ
\tan 15^\circ ~ 2-\sqrt3 ~ \tan(15^\circ)
2-\sqrt{3} ~ -\sqrt3+2
|x|+|y| ~ |y|+|x|
\max(a,b) ~ \max\{a,b\} ~ \max(b,a)
\gcd(m,n) ~ \gcd(n,m)
x=5 ~ 5 ~ 5=x
\dfrac{2}{3} ~ 2/3 ~ \frac{2}{3} ~ \tfrac23
\frac{2\pi}{3} ~ \frac23\pi ~ 2\pi/3
0.\overline{27} ~ \frac{3}{11} ~ 0.\overline{2727}
12.5\% ~ 0.125 ~ \frac18 ~ 12.5
1\,000\,000 ~ 1000000
\sqrt[4]{x^3} ~ x^{3/4} ~ x^{0.75}
2^{-n} ~ \frac{1}{2^n} ~ \left(\frac12\right)^n ~ (1/2)^n
(a+b)^3 ~ a^3+3a^2b+3ab^2+b^3
x^4+x^2+1 ~ (x^2+x+1)(x^2-x+1)
A=\frac{1}{2}bh ~ \frac12 bh ~ A = bh/2
v=\sqrt{2gh} ~ \sqrt{2gh} ~ v=(2gh)^{1/2}
a=b=c=1 ~ (1,1,1) ~ a=1,b=1,c=1 ~ c=b=a=1
a=b=c ~ c=b=a ~ a = c = b
x_1=x_2=\cdots=x_n=1 ~ x_1=x_2=\dots=x_n=1
\{x|1<x<2\} ~ (1,2) ~ 1<x<2 ~ \{x \mid 1<x<2\} ~ \{x : 2>x>1\}
\{t \mid t \ge 1\} ~ [1,\infty) ~ t\ge1
(\pm 1, 0) ~ (1,0),(-1,0) ~ (-1,0) \text{ and } (1,0)
(0, \pm\sqrt2) ~ (0,\sqrt2),(0,-\sqrt2) ~ \{(0,-\sqrt2),(0,\sqrt2)\}
(0,0), (1,1), (-1,1) ~ (0,0), (\pm1,1)
\mathbb{R}\setminus\{0,1\} ~ \mathbb{R}\setminus\{1,0\} ~ (-\infty,0)\cup(0,1)\cup(1,\infty)
\binom{n}{3} ~ \frac{n(n-1)(n-2)}{6} ~ \frac{n^3-3n^2+2n}{6}
\text{Area} = 5 ~ 5 ~ \text{Area}=5 ~ \overline{AB}=5
AB=5 ~ 5 ~ BA=5 ~ x=5
10 \text{ a.m.} ~ 10 ~ 10\text{ am} ~ 10 \text{ A.M.}
2^n(n+1) ~ (n+1)2^n ~ n2^n+2^n
x = -\frac{\pi}{6} + 2n\pi ~ x=-\frac\pi6+2\pi n,\ n\in\mathbb{Z} ~ -\frac{\pi}{6}+2k\pi\ (k\in\mathbb{Z}) ~ x=2n\pi-\frac{\pi}{6}, \text{ where } n \text{ is any integer}
\left\{x \mid x = \frac{\pi}{3}+k\pi, k\in\mathbf{Z}\right\} ~ x=\frac{\pi}{3}+k\pi, k\in\mathbb{Z} ~ x=\frac{\pi}{3}+k\pi ~ \frac{\pi}{3}+n\pi,n\in\mathbb{Z}
m\equiv 2,3 \pmod 5 ~ m\equiv 3\text{ or }2\pmod5 ~ m\equiv\pm2\pmod 5 ~ m\equiv2\pmod5\text{ or }m\equiv3\pmod5
\text{all rational numbers} ~ \mathbb{Q} ~ \text{the rational numbers} ~ \text{all rationals}
\text{all real numbers} ~ \mathbb{R} ~ x\in\mathbf{R} ~ (-\infty,\infty) ~ \text{every real number}
\mathbb{N} ~ \text{all natural numbers} ~ \text{the set of natural numbers}
1220_3 ~ 1220_{\text{three}} ~ 1220 \text{ (base 3)} ~ 1220_{(3)}
3C_{16} ~ (3C)_{16} ~ 3C
42000000 ~ 42\text{ million}
0.75\text{ billion} ~ 750000000 ~ 750\text{ million} ~ 7.5\times10^8
(2,3),(-2,-3) ~ x=2,y=3\text{ or }x=-2,y=-3
(p,q)=(2,7),(3,5) ~ p=2,q=7\text{ or }p=3,q=5 ~ p=2\text{ and }q=7\text{, or }p=3\text{ and }q=5
\begin{pmatrix}\frac{3}{4}&-\frac14\\0&\frac12\end{pmatrix} ~ \frac14\begin{pmatrix}3&-1\\0&2\end{pmatrix}
[-3,\infty) ~ \{x\in\mathbb{R}\mid x\ge-3\} ~ \{y: y\ge-3\}
(-5,5) ~ \{x : -5<x<5\} ~ \{x\in\mathbf{R}\mid -5<x<5\}
(-\infty,0)\cup(0,3) ~ x<3, x\neq0 ~ x<3\text{ and }x\ne0 ~ \{x\mid x<3, x\ne0\}
6{:}05 ~ 6:05 ~ 6:05\text{ a.m.} ~ 6:05 AM
B, E ~ BE ~ \text{BE}
9\sqrt{3} ~ 9\sqrt3 cm^2
\frac{1}{4}\ln 3 ~ \ln\sqrt[4]{3}
0.1 ~ 10^{-1}
10^9 ~ 1\text{ billion}
\frac{2}{11} ~ 0.1818\ldots ~ 0.181818...
\binom{n-1}{2} ~ {n-1\choose2}
n\text{ is composite} ~ n \text{ composite} ~ n\text{ is a composite number} ~ \text{composite }n
\text{no solution} ~ \text{No solutions exist} ~ \{\} ~ \text{there is no solution}
f(x)=x^3+ax ~ f(t)=t^3+at
Q(x)=x^2+x ~ Q(t)=t^2+t
t=0,\ \pm\sqrt{2} ~ t\in\{0,\pm\sqrt2\}
4.0\times10^{3}\text{ J} ~ 4\text{ thousand J}
12\text{ m/s}^2 ~ 12\,\mathrm{m\cdot s^{-2}}
4\text{ feet }6\text{ inches} ~ 4\text{ feet and }6\text{ inches}
9:16 ~ 9{:}16 ~ 9\text{ to }16
\lnot p\lor q ~ \neg p\vee q
\frac35\mathbf{i}-\frac45\mathbf{j} ~ -\frac45\hat{j}+\frac35\hat{i}
x=\frac{\pi}{4}+k\pi ~ \frac{\pi}{4}+k\pi, k\in\mathbb{Z} ~ x=\frac{\pi}{4}+k\pi,\; k \in \mathbb Z ~ \left\{\frac{\pi}{4}+k\pi \mid k\in\mathbb{Z}\right\} ~ \frac\pi4 + \pi n, \text{ for } n \in \mathbb{Z} ~ x=\pi k+\frac\pi4, k\text{ integer} ~ x = \frac{(4k+1)\pi}{4}, k \in \mathbb{Z}
x=2k\pi ~ 2k\pi\ (k\in\mathbf{Z}) ~ 2\pi k, k\in Z ~ x=2\pi n, n\in\mathbb{Z} ~ 2k\pi\text{, where }k\text{ is an integer} ~ x=2k\pi\text{ for some integer }k
\frac{k\pi}{2}, k\in\mathbb{Z} ~ x=\frac{k\pi}{2}, k\in\mathbb{Z} ~ x = \frac{\pi k}{2} \text{ for } k \in \mathbb{Z} ~ \frac{n\pi}{2}\text{ for integer }n
n\equiv 0,1\pmod 4 ~ n\equiv 1\pmod{4}\text{ or }n\equiv 0\pmod{4} ~ n \equiv 0 \pmod 4, n\equiv 1\pmod 4 ~ n\equiv 0 (\bmod 4)\text{ or }n\equiv 1(\bmod 4) ~ 0,1\pmod 4
n\equiv 0, 2 \text{ or } 3\pmod 6 ~ n\equiv 0,2,3\pmod 6 ~ n \equiv 3, 2, 0 \pmod{6} ~ n\equiv 0\pmod6, n\equiv2\pmod 6\text{, or }n\equiv3\pmod6
\text{all real numbers} ~ \mathbb{R} ~ \text{the set of all real numbers} ~ x\in(-\infty,\infty) ~ \text{any real number}
\mathbb{Z} ~ \text{All integers.} ~ \text{the set of all integers}
101_2 ~ 101_{\text{two}} ~ 101_{(2)} ~ 101_{\text{base }2} ~ 101\text{ in base }2 ~ \mathrm{101}_2 ~ 101_{\mathrm{two}}
5000000 ~ 5\text{ million} ~ 5 \mathrm{\ million} ~ \text{5 million} ~ 5~\text{million} ~ \$5\text{ million} ~ 5.0\text{ million}
300 ~ 3\text{ hundred}
(1,2),(2,1) ~ x=1,y=2 \text{ or } x=2,y=1 ~ x=1, y=2\text{ and }x=2,y=1 ~ (x=1,y=2), (x=2,y=1) ~ \{x=1,y=2\}\text{ or }\{x=2,y=1\} ~ x=1\text{ and }y=2\text{, or }x=2\text{ and }y=1 ~ \begin{cases}x=1\\y=2\end{cases}\text{ or }\begin{cases}x=2\\y=1\end{cases}
\begin{pmatrix}\frac13&\frac23\\1&\frac43\end{pmatrix} ~ \frac13\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \dfrac{1}{3}\left(\begin{array}{cc}1&2\\3&4\end{array}\right) ~ \frac{1}{3} \cdot \begin{bmatrix}1&2\\3&4\end{bmatrix} ~ (1/3)\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}-\frac12\\\frac32\end{pmatrix} ~ \frac12\begin{pmatrix}-1\\3\end{pmatrix} ~ -\frac12\begin{pmatrix}1\\-3\end{pmatrix} ~ \frac{1}{2}(-1,3)
x>2 ~ \{x\in\mathbb{R}: x>2\} ~ \{x\in\mathbb{R}\ |\ x>2\} ~ x\in\{x\mid x>2\} ~ \{x\,|\,x>2,\,x\in\mathbb{R}\}
1<x\le 3 ~ \{x\in\mathbb{R}\mid 1<x\le3\} ~ \{x: x>1\text{ and }x\le 3\}
3:30 ~ 3{:}30 ~ 3:30 pm ~ 3:30\,\text{p.m.} ~ \text{3:30 p.m.}
A, C ~ AC ~ \text{AC} ~ (A)(C) ~ A\&C ~ A~C ~ A \text{ & } C
2\sqrt3 ~ 2\sqrt3 m ~ 2\sqrt{3}~m ~ 2\sqrt{3}m ~ 2\sqrt3\,m^2 ~ 2\sqrt{3} m/s
\frac{\sqrt3}{2}\text{ cm}^2 ~ \frac{\sqrt{3}}{2} cm^2
\frac12\ln2 ~ \ln\sqrt2 ~ \ln(\sqrt{2}) ~ \ln 2^{1/2}
\frac13\ln 4 ~ \ln\sqrt[3]{4}
1000 ~ 10^3 ~ 10^{3} ~ 10**3 ~ 10^3\text{ m}
0.001 ~ 10^{-3}
\frac13 ~ 0.333\ldots ~ 0.333... ~ 0.333\dots ~ .333\ldots ~ 0.3333\cdots
\frac17 ~ 0.142857142857\ldots
2 ~ 1.999\ldots ~ 2.000\ldots
(0.333\ldots, 2) ~ (\frac13,2) ~ (0.\overline3,2)
p\land q ~ p ∧ q
\neg(p\lor q) ~ \lnot(p\lor q) ~ \neg (q\lor p)
\alpha = \frac{5\pi}{12} + k\pi ~ \frac{5\pi}{12}+k\pi \text{ for all integers } k ~ \alpha=\frac{5\pi}{12}+n\pi, \text{ where } n\in\mathbb{Z}
n \equiv 3, 5 \pmod{8} ~ n\equiv 5,3\pmod 8 ~ n \equiv 3 \pmod 8 \text{ or } n\equiv 5 \pmod 8 ~ n \equiv 3 \text{ or } 5 \bmod 8
\mathbb{R} \setminus \{-2, 2\} ~ x\neq \pm 2 ~ x \ne -2, 2 ~ x\ne 2 \text{ and } x\ne -2 ~ \{x\in\mathbb{R}: x\ne\pm2\}
\text{all integers} ~ \mathbb{Z} ~ \text{the integers}
111_5 ~ 111_{\text{five}}
1F4_{16} ~ 1F4_{\text{sixteen}}
1.5 \text{ trillion} ~ 1500000000000 ~ 1.5\times 10^{12} ~ 1{,}500{,}000{,}000{,}000
250000 ~ 250\text{ thousand}
(4,1),(1,4) ~ x=4, y=1 \text{ or } x=1, y=4
(m,n)=(2,3),(3,2) ~ m=2,n=3 \text{ or } m=3,n=2
(0,0,0),(1,1,1) ~ x=y=z=0 \text{ or } x=y=z=1
\begin{pmatrix} 2/5 & 1/5 \\ 1/5 & 3/5\end{pmatrix} ~ \frac{1}{5}\begin{pmatrix}2&1\\1&3\end{pmatrix}
(-\infty, 4) ~ \{x\in\mathbb{R} : x<4\} ~ \{x \mid x<4\} ~ \{x|x<4, x\in\mathbb{R}\}
(1,2)\cup(2,\infty) ~ x>1, x\neq 2 ~ x>1 \text{ and } x \ne 2 ~ \{x: x>1, x\neq2\}
12:45\text{ p.m.} ~ 12:45 ~ 12:45 PM ~ 12{:}45\text{ pm}
A, B, D ~ ABD ~ \text{ABD}
4\sqrt{7} ~ 4\sqrt7 cm
\frac{\ln 3}{2\ln 2} ~ \log_2\sqrt3
10000 ~ 10^4 ~ 10^{4} \text{ m}
\frac{4}{9} ~ 0.444\ldots
1\frac{1}{6} ~ 1.1666\ldots
\binom{13}{5} ~ {13\choose5}
\text{parabola} ~ \text{a parabola}
n\text{ is even} ~ n \text{ even} ~ \text{even } n ~ n\text{ is an even integer}
\text{Bob} ~ \text{bob}
\varnothing ~ \text{No solutions} ~ \text{the empty set}
P(x)=x^2-1 ~ P(t)=t^2-1
2.5\text{ m/s} ~ 2.5\,\mathrm{m\,s^{-1}}
3\text{ days }4\text{ hours} ~ 3\text{ days and }4\text{ hours}
7:4 ~ 7{:}4 ~ 7\text{ to }4
\$1.2\text{ million} ~ 1200000 ~ \$1{,}200{,}000 ~ 1.2\text{ million dollars}
p\land(q\lor r) ~ p\land(r\lor q)
-2\mathbf{i}+\mathbf{j} ~ \hat{j}-2\hat{i}
x = \frac{\pi}{3} + 2k\pi ~ \frac{\pi}{3}+2\pi k, k\in\mathbb{Z} ~ x=\frac{\pi}{3}+2k\pi \text{ for any integer } k ~ x = \frac\pi3+2\pi k\ (k \in \mathbb{Z})
x=\frac{\pi}{2}+n\pi, n\in\mathbb{Z} ~ x = \frac{\pi}{2}+n\pi \text{ where } n \text{ is an integer} ~ \frac{\pi}{2}+n\pi,\ n \in \mathbb{Z} ~ x=\frac{\pi}{2} + \pi n
30^\circ + 360^\circ k, k \in \mathbb{Z} ~ 30^\circ+360^\circ k \text{ for integers } k
n \equiv 0, 1 \pmod{4} ~ n\equiv 1,0 \pmod 4 ~ n \equiv 0 \text{ or } 1 \pmod 4 ~ n\equiv 0\pmod 4 \text{ or } n\equiv 1 \pmod 4 ~ n \equiv 0 \text{ or } n\equiv 1 \pmod{4}
p \equiv \pm 1 \pmod 8 ~ p\equiv 1,7\pmod 8 ~ p \equiv 1 \text{ or } 7 \pmod{8}
\mathbb{R} ~ \text{all real numbers} ~ \text{All reals} ~ x \text{ is any real number} ~ \text{all real } x ~ \text{all real numbers } x
\mathbb{Z} ~ \text{all integers} ~ \text{the set of integers}
\text{all positive integers} ~ \text{all positive integers } n ~ \text{every positive integer} ~ \mathbb{Z}^+ ~ \mathbb{Z}_{>0}
1011_2 ~ 1011_{\text{two}} ~ 1011_{(2)} ~ 1011 \text{ base } 2 ~ 1011_{two}
2B3_{16} ~ 2B3
345_6 ~ 345_{\text{six}} ~ 345\text{ (base 6)}
5000000 ~ 5 \text{ million} ~ 5\text{ million dollars}
2.5 \text{ billion} ~ 2500000000 ~ 2{,}500{,}000{,}000 ~ 2.5\times10^9
12000 ~ 12 \text{ thousand}
(1,3),(3,1) ~ x=1,y=3 \text{ or } x=3,y=1
(0,0),(2,4) ~ x=0, y=0; x=2, y=4
\begin{pmatrix} 1/3 & 2/3 \\ -1/3 & 4/3 \end{pmatrix} ~ \frac13 \begin{pmatrix} 1 & 2 \\ -1 & 4\end{pmatrix} ~ \frac{1}{3}\begin{bmatrix}1&2\\-1&4\end{bmatrix}
(2,\infty) ~ \{x\in\mathbb{R}: x>2\} ~ \{x \in \mathbb{R} \mid x > 2\} ~ \{x \mid x \in \mathbb R, x>2\}
x \neq 1 ~ \{x\in\mathbb{R} : x\neq 1\} ~ \mathbb{R} - \{1\}
x \le -2 \text{ or } x \ge 5 ~ \{x : x\le -2 \text{ or } x\ge5\}
3:30 ~ 3{:}30 ~ 3:30\text{ p.m.} ~ 3:30 pm
10:45 \text{ a.m.} ~ 10:45 ~ 10:45 AM ~ 10{:}45\text{ am}
A, C ~ AC
B, D, E ~ BDE ~ \mathrm{BDE}
2\sqrt{3} ~ 2\sqrt3 m
12\pi ~ 12\pi cm^2
\frac12 \ln 2 ~ \ln\sqrt2 ~ \ln \sqrt{2}
\ln 2 - \frac12\ln 3 ~ \ln\frac{2}{\sqrt3} ~ \ln 2 - \ln\sqrt3
1000 ~ 10^3 ~ 10^{3}
10^{6} ~ 1{,}000{,}000
\frac{1}{3} ~ 0.333\ldots ~ 0.3333...
\frac{1}{6} ~ 0.1666\ldots ~ 0.16666\dots
\frac{3}{11} ~ 0.272727\ldots
\begin{pmatrix} 3 \\ -1 \\ 4 \end{pmatrix} ~ [3,-1,4]^T
3\mathbf{i} - 2\mathbf{j} ~ 3\hat{i}-2\hat{j}
1 \text{ hour } 20 \text{ minutes} ~ 1\text{ hour and }20\text{ minutes}
\binom{20}{10} ~ {20 \choose 10}
\binom{2n}{n} ~ \frac{(2n)!}{n!n!} ~ \frac{(2n)!}{(n!)^2}
f(x)=0, f(x)=x^2 ~ f(x)\equiv 0 \text{ or } f(x)=x^2
f(x)=ax+b ~ f(t)=at+b
[-1, 3) ~ \{x: -1\le x<3\} ~ [-1,3[
(-\infty, 0) \cup (0, 4] ~ x\le 4, x\neq 0
\emptyset ~ \text{no solution} ~ \text{empty set}
\text{No solution} ~ \text{No solutions} ~ \text{There is no solution} ~ \emptyset
204 ~ 204^{}
3:5 ~ 3\text{ to }5 ~ 3{:}5
n \text{ is odd} ~ n\text{ odd} ~ \text{odd } n
x > 0, y > 0 ~ x>0 \text{ and } y>0
\theta = \frac{\pi}{6} + k\pi ~ \theta=\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~ \theta = \frac{\pi}{6} + n\pi \text{ for } n \in \mathbb{Z} ~ \frac{\pi}{6}+k\pi \quad (k\in\mathbb{Z})
x = k\pi \text{ or } x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ~ k\pi, \frac{\pi}{4}+k\pi\ (k\in\mathbb{Z})
n\equiv 2 \pmod{6} \text{ or } n\equiv 4\pmod 6 ~ n\equiv 2,4\pmod6 ~ n \equiv \pm 2 \pmod 6 ~ n \equiv 4, 2 \pmod{6}
\text{all real numbers} ~ \mathbb{R} ~ (-\infty,\infty) ~ x\in\mathbb{R} ~ \text{all reals} ~ (-\infty, +\infty)
\text{All positive integers} ~ \mathbb{Z}^{+} ~ \text{any positive integer}
(0,\infty) ~ \text{all positive real numbers} ~ \mathbb{R}^+ ~ \mathbb{R}_{>0} ~ \text{positive reals}
[0,\infty) ~ \text{all nonnegative real numbers} ~ \text{all non-negative reals}
2102_3 ~ 2102_{\text{three}} ~ 2102_{(3)} ~ 2102\text{ base }3
A5_{12} ~ A5 ~ A5_{\text{twelve}}
3.2\text{ million} ~ 3200000 ~ 3{,}200{,}000 ~ 3.2\times10^6 ~ 3.2 million people
700000 ~ 700 \text{ thousand}
x=2,y=5 \text{ or } x=5,y=2 ~ (2,5),(5,2) ~ (x,y)=(2,5),(5,2) ~ (5,2) \text{ or } (2,5)
(a,b) = (1,2) \text{ or } (2,1) ~ a=1,b=2 \text{ or } a=2,b=1
\{x \mid x\neq -3\} ~ \{x\in\mathbb{R}\mid x\ne -3\}
x\ge 2, x\neq 3 ~ [2,3)\cup(3,\infty) ~ \{x : x\ge2, x\ne3\} ~ x\ge 2 \text{ and } x\ne 3
-2<x<0 \text{ or } x>3 ~ \{x: -2<x<0 \text{ or } x>3\}
7{:}15 ~ 7:15 ~ 7:15\text{ a.m.} ~ 7:15 am ~ 7:15~\text{AM}
B, C ~ BC
5\sqrt{2}\text{ cm} ~ 5\sqrt2 cm
36\pi \text{ cm}^3 ~ 36\pi cm^3
\frac{1}{3}\ln 5 ~ \ln\sqrt[3]{5} ~ \ln 5^{1/3}
0.01 ~ 10^{-2}
100000 ~ 10^5 ~ 10^{5}
0.\overline{6} ~ 0.666\ldots ~ 0.6666...
\frac{5}{12} ~ 0.41666\ldots
\binom{8}{3} ~ {8 \choose 3}
n\text{ is prime} ~ n\text{ prime} ~ n \text{ is a prime} ~ \text{prime } n
\text{ellipse} ~ \text{an ellipse}
\emptyset ~ \text{no solution} ~ \text{no solutions} ~ \text{no real solutions} ~ \text{There are no solutions}
f(x)=0 \text{ and } f(x)=2x ~ f(x)\equiv 0, f(x)=2x
f(n)=n \text{ for all } n ~ f(n) = n \text{ for every } n
\left(-\frac12,\frac32\right) ~ ]-\frac12,\frac32[
\ln(x^2+1)+C ~ \ln|x^2+1|+C
2\text{ hours }30\text{ minutes} ~ 2\text{ hours and }30\text{ minutes} ~ 2\text{ hr }30\text{ min}
5\text{ to }3 ~ 5:3 ~ 5{:}3 ~ 5 : 3
75\text{ cents} ~ 75¢
p\lor\lnot q ~ p\vee\neg q ~ \neg q\lor p
2\mathbf{i}-\mathbf{j}+3\mathbf{k} ~ 2\hat{i}-\hat{j}+3\hat{k}
(1,-2,3)^T ~ \begin{pmatrix}1\\-2\\3\end{pmatrix} ~ (1,-2,3)
C(20,10) ~ \binom{20}{10} ~ {}_{20}C_{10} ~ ^{20}C_{10}
\binom{2n}{n} ~ C(2n, n)
x^2+(y-2)^2=9 ~ x^2+(y-2)^2=3^2
\frac{x^2}{25}+\frac{y^2}{9}=1 ~ \frac{x^2}{5^2}+\frac{y^2}{3^2}=1
n\equiv0,1\pmod4 ~ n\bmod4\in\{0,1\} ~ n\equiv\{0,1\}\pmod 4 ~ n\bmod4=0\text{ or }n\bmod4=1
2e^{i\pi/3} ~ 1+i\sqrt3 ~ 2\operatorname{cis}60^\circ ~ 2\left(\cos\frac\pi3+i\sin\frac\pi3\right)
\text{cis }40^\circ ~ \cos40^\circ+i\sin40^\circ
(x,y)=\pm(2,3) ~ (2,3),(-2,-3) ~ \pm(2,3)
(2,3),(-2,-3) ~ (x,y)=\pm(2,3)
(-2,2) ~ |x|<2 ~ 2>|x|
|x|\ge\sqrt3 ~ (-\infty,-\sqrt3]\cup[\sqrt3,\infty) ~ x\le-\sqrt3\text{ or }x\ge\sqrt3
[-4,-2]\cup[2,4] ~ 2\le|x|\le4
(-\infty,2)\cup(2,5)\cup(5,\infty) ~ x\in\mathbb{R}\setminus\{2,5\}
5000000 ~ \text{five million} ~ five million
120000 ~ \text{one hundred twenty thousand} ~ \text{one hundred and twenty thousand}
\text{twenty-one} ~ 21 ~ \text{twenty one}
\{-2,3\} ~ x_1=-2, x_2=3 ~ x_1=3,x_2=-2
\text{all real numbers} ~ \text{All real values of } x
xy=6 ~ 6
xy=6 ~ yx=6
x+y=6 ~ y+x=6
AB=5 ~ x=5
AB=5 ~ BA=5
AB=5 ~ \overline{AB}=5
\text{Area}=5 ~ A=5
m+n=42 ~ S=42
f(2)=4 ~ y=4
x=42 ~ 42=x
\angle A=60^\circ ~ 60
P(A)=\frac13 ~ \frac13
x_1+x_2=5 ~ x_2+x_1=5
\text{Area}=12 ~ \text{Area of }ABC=12
N=5 ~ \text{Number}=5
\langle 3,-4\rangle ~ 3\mathbf{i}-4\mathbf{j} ~ 3\hat{i}-4\hat{j} ~ 3\vec{i}-4\vec{j} ~ -4\mathbf{j}+3\mathbf{i}
\begin{pmatrix}2\\0\\-1\end{pmatrix} ~ 2\mathbf{i}-\mathbf{k}
\frac35\mathbf{i}-\frac45\mathbf{j} ~ \left(\frac35,-\frac45\right)
f(x)=cx\text{ for any constant }c ~ f(x)=kx,\ k\in\mathbb{R} ~ f(x)=ax, \text{ where } a \text{ is an arbitrary constant}
\emptyset ~ \text{None} ~ \text{none}
\text{all real numbers except }3 ~ x\ne3 ~ \mathbb{R}\setminus\{3\} ~ (-\infty,3)\cup(3,\infty) ~ \text{All reals except }x=3.
\text{all real numbers except }-1\text{ and }2 ~ x\ne-1,2 ~ \text{all real numbers other than $2$ and $-1$}
\mathbb{Z}\setminus\{0\} ~ \text{all integers except }0
\text{infinitely many} ~ \text{Infinitely many solutions} ~ \text{There are infinitely many solutions.} ~ \text{infinite number of solutions}
\$4.50 ~ 4\text{ dollars and }50\text{ cents} ~ 450\text{ cents} ~ \$4.5
\$0.75 ~ 75\text{ cents} ~ 75¢
90\text{ minutes} ~ 1.5\text{ hours} ~ 1\text{ hour }30\text{ minutes} ~ 1 h 30 min ~ 1\text{ hr and }30\text{ mins}
6\text{ feet }2\text{ inches} ~ 6\text{ ft }2\text{ in} ~ 74\text{ inches}
250\text{ cm} ~ 2.5\text{ m}
40\text{ m}^2 ~ 40\text{ square meters} ~ 40\ \mathrm{m^2}
45\text{ mph} ~ 45\text{ miles per hour} ~ 45\text{ mi/h}
10:00\text{ a.m.} ~ 10\text{ AM}
1:4 ~ \frac14 ~ 1/4 ~ 1\text{ to }4
\frac{9}{7} ~ 9:7
[3,\infty) ~ \text{all real numbers greater than or equal to }3 ~ \text{all reals at least 3} ~ x\text{ is no less than }3
(2,5) ~ \text{all real numbers strictly between 2 and 5} ~ x\text{ is between }2\text{ and }5\text{, exclusive} ~ \text{all numbers greater than 2 and less than 5}
[2,5] ~ \text{between 2 and 5, inclusive} ~ \text{from 2 to 5 (inclusive)}
(0,5) ~ \text{all positive real numbers less than }5
(-\infty,0] ~ \text{all nonpositive real numbers}
x>4 ~ \text{all }x\text{ greater than }4 ~ x\text{ more than }4
\{n\in\mathbb{Z}\mid n>4\} ~ \text{all integers }n\text{ greater than }4
n\equiv0\pmod3 ~ 3\mid n ~ n\text{ is divisible by }3 ~ n\text{ is a multiple of 3} ~ n=3k ~ n=3k, k\in\mathbb{Z} ~ \text{multiples of }3
n\text{ is odd} ~ n\equiv1\pmod2 ~ n=2k+1, k\in\mathbb{Z} ~ n\equiv1,3\pmod4 ~ n=2k-1
2\mid n ~ n\text{ is even} ~ n=2m\text{ for some integer }m
4\nmid n ~ n\text{ is not divisible by }4
x\equiv11\pmod{30} ~ x=30k+11 ~ x=11+30t, t\in\mathbb{Z} ~ 11\pmod{30} ~ x=30k-19
n=4k+1, k\in\mathbb{Z} ~ n\equiv1\pmod4 ~ n=4m+5, m\in\mathbb{Z} ~ n\equiv1,5\pmod8
n=6k\pm1 ~ n\equiv\pm1\pmod6 ~ n\equiv1,5\pmod6
n=3k\text{ or }n=3k+1, k\in\mathbb{Z} ~ n\equiv0,1\pmod3
n=k^2\text{ for some integer }k ~ n\text{ is a perfect square} ~ n=m^2
n\text{ is a perfect cube} ~ n=k^3
\text{perfect squares} ~ \text{all perfect squares}
\text{Alice and Carol} ~ \text{Alice, Carol} ~ \text{Carol and Alice}
f(n)=2n ~ f(n)=2n\text{ for all }n
f(x)=x ~ f(x)=x\text{ for all real }x ~ f(x)=x\text{ for all }x\in\mathbb{R}
P(x)=0\text{ or }P(x)=x^2 ~ P(x)=x^2, P(x)=0
\text{all positive integers }n ~ \text{all }n\in\mathbb{Z}^+
""".strip().splitlines()
]
"""The known answer, then other ways to write it."""

UNEQUAL = [
    line.split(" ~ ")
    for line in r"""
12 cm^2 ~ 12 cm
12\text{ cm}^3 ~ 12\text{ cm}^2
60 miles ~ 60 miles per hour
20\% \text{ increase} ~ 20\% \text{ decrease}
7 \text{ apples} ~ 7 \text{ pears}
5 \text{ red balls} ~ 5 \text{ blue balls}
\$5 ~ 5 euros
1 ~ n \equiv 1 \pmod{4}
n \equiv 1 \pmod 3 ~ n \equiv 1 \pmod{4}
n \equiv 3 \pmod 4 ~ n \equiv 1 \pmod{4}
m \equiv 1 \pmod 4 ~ n \equiv 1 \pmod{4}
n = 1 ~ n \equiv 1 \pmod{4}
4 ~ n \equiv 1 \pmod{4}
2 ~ 1, 2, \ldots, n
n ~ 1, 2, \ldots, n
1,2,n ~ 1, 2, \ldots, n
1, 3, \ldots, n ~ 1, 2, \ldots, n
1, 2, \ldots, 2n ~ 1, 2, \ldots, n
1, 2, \ldots ~ 1, 2, \ldots, n
1+2+\cdots+2n ~ 1+2+\cdots+n
1+3+\cdots+n ~ 1+2+\cdots+n
1:2:4 ~ 1:2:3
1:2 ~ 1:2:3
1 ~ 1:2
1/2 ~ 1:2:3
2:1 ~ 1:2
3:01 ~ 3:00
5 ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
6 ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
5,6 ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
5 \text{ if } n \text{ is odd}, 6 \text{ if } n \text{ is even} ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
5 \text{ if } n \text{ is even} ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
5 \text{ if } n \text{ is even}, 7 \text{ if } n \text{ is odd} ~ 5 \text{ if } n \text{ is even}, 6 \text{ if } n \text{ is odd}
5 ~ 5 \text{ if even}
5 \text{ if odd} ~ 5 \text{ if even}
5 \text{ when even} ~ 5
5 \text{ for even } n ~ 5
5 ~ 5 \text{ for } n>2
1 ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
0 ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
1,0 ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
\begin{cases} 1 & x>0 \\ 5 & x \le 0\end{cases} ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
\begin{cases} 1 & x\ge 0 \\ 0 & x < 0\end{cases} ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
\begin{cases} 0 & x>0 \\ 1 & x \le 0\end{cases} ~ \begin{cases} 1 & x>0 \\ 0 & x \le 0\end{cases}
0 ~ f(x)=x, f(x)=0
x ~ f(x)=x, f(x)=0
f(x)=x ~ f(x)=x, f(x)=0
f(x)=0 ~ f(x)=x, f(x)=0
f(x)=x, f(x)=1 ~ f(x)=x, f(x)=0
f(x)=x, g(x)=0 ~ f(x)=x, f(x)=0
g(x)=2x ~ f(x)=2x
2,1 ~ a=1, b=2
a=2,b=1 ~ a=1, b=2
a=1 ~ a=1, b=2
\{1,2\} ~ a=1, b=2
(2,1) ~ a=1, b=2
2 ~ x=2 \text{ or } x=3
x=2 ~ x=2 \text{ or } x=3
2 ~ \pm 2
-2 ~ \pm 2
\pm 2 ~ 2
x=2,y=-2 ~ x=\pm 2
(2,1),(3,4) ~ (1,2),(3,4)
(3,2) ~ (2,3)
\{2,3\} ~ (2,3)
[2,3] ~ (2,3)
(2,3] ~ (2,3)
(2,3) ~ [2,3]
x<3 ~ x\le 3
(-\infty,3] ~ x<3
(3,\infty) ~ x<3
x>1 \text{ and } x<3 ~ x>1 \text{ or } x<3
x<1 \text{ and } x>2 ~ x<1 \text{ or } x>2
z=1 ~ |z|=1
x=2 ~ y=2
x_1=2 ~ x_2=2
(0,1)\times(0,2) ~ (0,2)\times(0,1)
x<-\frac12 \text{ and } x>\frac12 ~ x<-\frac12 \text{ or } x>\frac12
x<-\sqrt2, x>\sqrt2 ~ -\sqrt2<x<\sqrt2
y<3 ~ x<3
1<x<3 ~ 1<x\le 3
(1,3) ~ x>1
\mathbb{R}\setminus\{1\} ~ \mathbb{R}\setminus\{0\}
\mathbb{Z} ~ \mathbb{R}
\mathbb{R} ~ \mathbb{R}\setminus\{0\}
0 ~ x\ne 0
x=0 ~ x\ne 0
\begin{pmatrix}1&2\\3&5\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&3\\2&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2&3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
4 ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
-2 ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
(2,1) ~ \begin{pmatrix}1\\2\end{pmatrix}
3\frac13 ~ 3\frac12
3 ~ 3\frac12
\frac32 ~ 3\frac12
5\% ~ 50\%
500 ~ 50\%
30 ~ 30^\circ, 60^\circ
30^\circ, 61^\circ ~ 30^\circ, 60^\circ
\frac{\pi}{6} ~ 30^\circ
30^\circ ~ \frac{\pi}{6}
0.333 ~ \frac13
0.3333333333333333 ~ \frac13
\frac13 ~ 0.333
1.414214 ~ \sqrt{2}
1.4142135623730951 ~ \sqrt{2}
\sqrt2 ~ 1.414214
3.14159265358979 ~ \pi
\frac{22}{7} ~ \pi
3.14 ~ \pi
\pi ~ 3.14
2.718281828 ~ e
1.0986 ~ \ln 3
1.0986122886681098 ~ \ln 3
0 ~ 10^{-12}
10^{-12} ~ 0
10^{-300} ~ 0
1e-12 ~ 0
0 ~ 1e-12
10^{-12}\sqrt2 ~ 10^{-13}\sqrt2
10^{20} ~ 10^{20}+1
100000000000000000000 ~ 10^{20}+1
10^{20}+2 ~ 10^{20}+1
10^{20}\sqrt{2}+1 ~ 10^{20}\sqrt{2}+2
\sqrt{2} ~ \sqrt{2}+10^{-30}
x ~ x+10^{-30}
1.0000000000001x ~ x
x+1e-9 ~ x
0.999999999999 ~ 1
0.\overline{9} ~ 2
2^{99} ~ 2^{100}
2^{100}+1 ~ 2^{100}
\sqrt{3} ~ \sqrt{2}
\sqrt{2} ~ -\sqrt{2}
\sqrt{2} ~ 2
\sqrt[3]{2} ~ \sqrt{2}
\sqrt[3]{2} ~ \sqrt[4]{2}
e^{\pi\sqrt{163}} ~ 262537412640768744
640320^3+744 ~ e^{\pi\sqrt{163}}
262537412640768744 ~ e^{\pi\sqrt{163}}
\ln 2 ~ \log 2
\log_3 2 ~ \log_2 3
\sin x ~ \cos x
\sin x^2 ~ \sin^2 x
x^2+2x ~ x^2+2x+1
(x+1)^3 ~ (x+1)^2
(x-2)(x+3) ~ (x-2)(x-3)
x/y ~ y/x
\sqrt{x^2} ~ x
|x| ~ x
x ~ |x|
x^2 ~ |x|
y=2x+3 ~ y=2x+1
2x+1 ~ y=2x+3
z=2x+1 ~ y=2x+1
x^2+y^2=16 ~ x^2+y^2=25
x^2-y^2=25 ~ x^2+y^2=25
25 ~ x^2+y^2=25
x^2+y^2 ~ x^2+y^2=25
x+y \ge 4 ~ x+y \le 4
x+y < 4 ~ x+y \le 4
x+y = 4 ~ x+y \le 4
even ~ \text{odd}
\text{not odd} ~ \text{odd}
\text{no solutions} ~ \text{one solution}
\text{5 solutions} ~ \text{no solution}
13\pi \text{ cm}^2 ~ 12\pi \text{ cm}^2
12 ~ 12\pi \text{ cm}^2
(0,1,0) ~ (0,0,1)
(0,1) ~ (0,0,1)
x_2 - x_1 ~ x_1-x_2
x_1+x_3 ~ x_1+x_2
a_{n+1} ~ a_n
\{x \mid x\ge 0\} ~ \{x \mid x>0\}
\{y \mid x>0\} ~ \{x \mid x>0\}
x>0 ~ \{x \mid x\ge0\}
1+\sqrt2 ~ 1\pm\sqrt2
1-\sqrt2,1+\sqrt3 ~ 1\pm\sqrt2
1-2i ~ 1+2i
1+2i ~ 1\pm2i
\infty ~ -\infty
0 ~ \infty
\emptyset ~ \{0\}
0 ~ \emptyset
\{\} ~ \{0\}
\{\emptyset\} ~ \emptyset
k\pi ~ k\pi, k\in\mathbb{Z}
2k\pi, k\in\mathbb{Z} ~ k\pi, k\in\mathbb{Z}
k\pi, k\in\mathbb{N} ~ k\pi, k\in\mathbb{Z}
\sum_{k=1}^n k ~ \sum_{k=1}^n k^2
\sum_{k=0}^n k^2 ~ \sum_{k=1}^n k^2
k^2 ~ \sum_{k=1}^n k^2
\int_0^2 f(x)\,dx ~ \int_0^1 f(x)\,dx
f(x) ~ \int_0^1 f(x)\,dx
\overline{AC} ~ \overline{AB}
\triangle ABD ~ \triangle ABC
99! ~ 100!
n!+1 ~ n!
(n+1)! ~ n!
\binom{n}{3} ~ \binom{n}{2}
(-1)^{n+1} ~ (-1)^n
1 ~ (-1)^n
2^{n} ~ 2^{n+1}
\lceil n/2\rceil ~ \lfloor n/2 \rfloor
n/2 ~ \lfloor n/2 \rfloor
1,000 ~ (1,000)
1000 ~ (1,000)
1234 ~ (1,234)
1234 ~ 1,2,3,4
12 ~ 1,2
12 ~ (1,2)
1.2 ~ (1,2)
2 ~ \{1,2\}
\{1\} ~ \{1,2\}
\{1,2,3\} ~ \{1,2\}
\{1,1,2\} ~ \{1,2,2\}
x=1,y=2,z=4 ~ x=1,y=2,z=3
3,2,1 ~ x=1,y=2,z=3
(3,2,1) ~ (a,b,c)=(1,2,3)
n=4k+3 ~ n=4k+1
4k+1 ~ n=4m+1
x ~ f'(x)=2x
\text{A} ~ \text{B}
\text{A and C} ~ \text{A and B}
\text{A or B} ~ \text{A and B}
A ~ \text{A and B}
6 ~ 2\text{ and }3
5 ~ 2\text{ or }3
2 \text{ dollars and } 5 \text{ cents} ~ 2 \text{ dollars and } 6 \text{ cents}
2 ~ 2 \text{ hours } 5 \text{ minutes}
2 \text{ hours } 6 \text{ minutes} ~ 2 \text{ hours } 5 \text{ minutes}
\frac{dy}{dx}=x ~ \frac{dy}{dx}=2x
p ~ p^2
\text{at most } 5 ~ 5
\text{at least } 5 ~ \text{at most } 5
5 ~ \text{at most } 5
5 ~ x\ge5
\ge 5 ~ 5
\approx 5 ~ 5
x ~ \{x\}
f(x)=x ~ f(x)=\{x\}
x+y ~ \{x+y\}
f^{2}(x) ~ f^{(2)}(x)
f^n(x) ~ f^{(n)}(x)
f^{(2)}(x) ~ f^{(3)}(x)
y^4 ~ y^{(4)}
\vec a\times\vec b ~ \vec b\times\vec a
\mathbf{a}\times\mathbf{b} ~ \mathbf{a}\cdot\mathbf{b}
A^{-1}B ~ BA^{-1}
P^{-1}AP ~ PAP^{-1}
P^{-1}AP ~ A
A^TB ~ BA^T
f\circ g ~ g\circ f
a\otimes b ~ b\otimes a
a\star b ~ b\star a
5.0001 ~ 5
-5 ~ 5
5i ~ 5
5^2 ~ 5
x^5 ~ 5
101_2 ~ 101_3
\frac{1}{3}, \frac12 ~ \frac13,\frac14
n \text{ odd} ~ n
n ~ n \text{ odd}
n ~ n \text{ even}
2n ~ 2n \text{ for all } n
1 \text{ for } n=1, 2 \text{ otherwise} ~ 2 \text{ for } n=1, 1 \text{ otherwise}
a > b > c ~ a < b < c
a>b ~ a>b>c
x=1 \Rightarrow y=2 ~ y=2
2 ~ x=1 \Rightarrow y=2
x \to 2 ~ x\to 3
2 ~ x\to 2
2\mid n ~ 3 \mid n
n ~ 2\mid n
2x ~ 2^x
(2x) ~ 2+x
1/2x ~ \frac{1}{2x}
x^{1/2} ~ x^{-1/2}
\sqrt{x+1} ~ \sqrt{x}+1
\sqrt{x}+1 ~ \sqrt{x+1}
-x^2 ~ (-x)^2
\log_2 x ~ \log_3 x
\cos 2x ~ 2\cos x
x^{y^z} ~ (x^y)^z
ab ~ a+b
a-b ~ b-a
AB ~ AC
e^{x+1} ~ e^x+1
\{0,\pm1\} ~ 0,1
\{0,\pm1\} ~ \pm1
\frac{5\pm\sqrt{13}}{2} ~ \frac{5+\sqrt{13}}{2}
\frac{5\pm\sqrt{13}}{2} ~ \frac{5\pm\sqrt{12}}{2}
x\equiv 2\pmod{5} ~ x\equiv 3\pmod{5}
x\equiv 2\pmod{5} ~ x\equiv 2\pmod{7}
x\equiv 2\pmod{5} ~ x=2
n\equiv 1,3\pmod 8 ~ n\equiv 1,5\pmod 8
n\equiv 1,3\pmod 8 ~ n\equiv 3\pmod 8
n\equiv 1,3\pmod 8 ~ n\equiv 1\pmod 8
[0,1)\cup(2,3] ~ [0,1)\cup[2,3]
[0,1)\cup(2,3] ~ [0,1)
[0,1)\cup(2,3] ~ [0,3]
[0,1)\cup(2,3] ~ [0,1)\cap(2,3]
x\le-1 \text{ or } x\ge 1 ~ -1\le x\le 1
x\le-1 \text{ or } x\ge 1 ~ x\ge 1
y=4-\frac{2x}{3} ~ y=4+\frac{2x}{3}
\frac{x^2}{9}+\frac{y^2}{4}=1 ~ \frac{x^2}{4}+\frac{y^2}{9}=1
\frac{x^2}{9}+\frac{y^2}{4}=1 ~ \frac{x^2}{9}-\frac{y^2}{4}=1
2:30 ~ 2:31
2:30 ~ 2
p=2, q=3 ~ p=3, q=2
p=2, q=3 ~ 3, 2
(p,q)=(2,3) ~ (3,2)
(p,q)=(2,3) ~ (q,p)=(2,3)
1:\sqrt{3}:2 ~ 1:\sqrt3
1:\sqrt{3}:2 ~ 1:2:\sqrt3
\begin{cases} x=1 \\ y=2 \end{cases} ~ \begin{cases} x=2 \\ y=1 \end{cases}
\begin{cases} x=1 \\ y=2 \end{cases} ~ x=1
\begin{cases} x=1 \\ y=2 \end{cases} ~ (2,1)
n \text{ is even} ~ n \text{ is odd}
n \text{ is even} ~ n
n \text{ is even} ~ m \text{ is even}
\text{all even } n ~ \text{all odd } n
\text{all even } n ~ \text{even } n
\text{all } n \ge 3 ~ \text{all } n \ge 4
\text{all } n \ge 3 ~ \text{all } n > 3
3 ~ \text{all } n \ge 3
n\ge3 ~ \text{all } n \ge 4
1, \frac12, \frac14, \ldots ~ 1, \frac12, \frac15, \ldots
1, \frac12, \frac14, \ldots ~ 1, \frac12
x_1, x_2, \ldots, x_n ~ x_1, x_2, \ldots, x_m
x_1, x_2, \ldots, x_n ~ x_1, x_2, x_n
1 \cdot 2 \cdot 3 \cdots n ~ 1\cdot2\cdot4\cdots n
a_1 + a_2 + \cdots + a_n ~ a_1+a_2+\cdots+a_{n-1}
\ldots ~ 1,2,\ldots
2^{2^n} ~ 2^{2n}
2^{2^n}+1 ~ 2^{2^n}
2^{-n} ~ 2^n
\sin 36^\circ ~ \sin 36
\tan 15^\circ ~ \tan 75^\circ
\max(a,b) ~ \min(a,b)
\gcd(m,n) ~ \gcd(m,k)
\frac{a}{b+c} ~ \frac{a}{b}+c
x^{3/2} ~ x^{2/3}
\log x^2 ~ (\log x)^2
10^{-20} ~ 0
10^{-20}x ~ 0
x+10^{-20} ~ x
\sqrt{2}\cdot10^{-40} ~ 0
\sqrt{2}+10^{-40} ~ \sqrt{2}
\sqrt{2}+10^{-400} ~ \sqrt{2}
(10^{-20})^{20}\sqrt2 ~ 0
\sin x+10^{-18} ~ \sin x
e^{-1000} ~ 0
e^{-10^{20}} ~ 0
0.1 ~ 0.10000000000000001
0.1x ~ 0.10000000000000001x
\pi+10^{-50} ~ \pi
10^{100} ~ 10^{100}+1
10^{1000}+x ~ 10^{1000}
3^{200} ~ 3^{200}+1
\frac{10^{30}+1}{10^{30}} ~ 1
355/113 ~ \pi
1.7320508075688772 ~ \sqrt{3}
(1.732,2) ~ (\sqrt3,2)
\{1.41421356\} ~ \{\sqrt2\}
1.414213562373095048801688724209698078569671875376948073176679 ~ \sqrt{2}
x<1.41421356 ~ x<\sqrt2
2.71828^x ~ e^x
0.6667x ~ \frac23 x
(0.333,0.667) ~ (\frac13,\frac23)
n^2 ~ n^3
n^2,n ~ n^2
n \to \infty ~ \infty
5 \pm 0.1 ~ 5
5 \text{ or more} ~ 5
5+ ~ 5
5x+ ~ 5x
x= ~ x
=5 ~ 6
= ~ 5
, ~ 5
5, ~ 5,6
5,6, ~ 5,6,7
\text{none} ~ 0
\text{undefined} ~ 0
\text{undefined} ~ \infty
\text{does not exist} ~ 0
\text{zero or one} ~ \text{zero}
x ~ \text{x axis}
y=0 ~ x\text{-axis}
x\text{-axis} ~ y\text{-axis}
f(x+1) ~ f(x)+f(1)
f(2x) ~ 2f(x)
f(x)+c ~ f(x)
g(f(x)) ~ f(g(x))
f(x)=x^2 ~ f(x^2)=x
f(-x)=f(x) ~ f(-x)=-f(x)
f(x) ~ f(-x)
a^{b+c} ~ a^{b}+a^{c}
a\mid b ~ b\mid a
a \to b ~ b\to a
A\cup B ~ A\cap B
A\setminus B ~ B\setminus A
A ~ A\cup B
A\subset B ~ B\subset A
P\Rightarrow Q ~ Q\Rightarrow P
\overline{AB} ~ AB
\angle ABC ~ \angle ACB
\triangle ABC ~ ABC
x\in A ~ x\notin A
\text{A: 5, B: 6} ~ \text{A: 6, B: 5}
\text{Alice: } 5, \text{Bob: } 6 ~ \text{Alice: } 6, \text{Bob: } 5
5 ~ \text{Alice: } 5, \text{Bob: } 6
5 \text{ apples and } 6 \text{ pears} ~ 5 \text{ apples and } 7 \text{ pears}
5 \text{ apples and } 6 \text{ pears} ~ 6 \text{ apples and } 5 \text{ pears}
5,6 ~ 5 \text{ apples and } 6 \text{ pears}
3 \text{ hours } 20 \text{ minutes} ~ 3 \text{ hours}
3 \text{ hours } 20 \text{ minutes} ~ 20 \text{ minutes}
\frac{d^2y}{dx^2} ~ \frac{dy}{dx}
\frac{dy}{dx} ~ \frac{y}{x}
\frac{d}{dx}x^3 ~ x^2
\int x\,dx ~ x
\lim_{x\to0} x ~ x
\sqrt{x}\sqrt{y} ~ \sqrt{x+y}
\{x\in\mathbb{R} \mid x>0\} ~ \{x\in\mathbb{Z} \mid x>0\}
\{(x,y)\mid x>y\} ~ \{(x,y)\mid x<y\}
(a,b) ~ (b,a)
\langle 1,2\rangle ~ \langle 2,1\rangle
[1,2,3] ~ [3,2,1]
((1,2),3) ~ (1,(2,3))
\{\{1\},2\} ~ \{1,2\}
(1,2,3) ~ (1,2),3
1\frac{1}{2} ~ 1\cdot\frac12
2\cdot\frac{3}{4} ~ 2\frac{3}{4}
23 ~ 2\cdot3
2x3 ~ 6x
0.\overline{3} ~ 0.3
0.\overline{36} ~ 0.3\overline{6}
0.3\overline{6} ~ 0.36
x_{10} ~ x_1 0
-\frac{-1}{2} ~ -\frac12
3! ~ 3
3!! ~ 720
n!! ~ (n!)!
i^2 ~ 1
-i ~ i
e^{i\pi} ~ 1
e^{i\theta} ~ \cos\theta
\infty ~ 10^{100}
1/0 ~ \infty
(1,2)\cup(3,4) ~ (1,2),(3,4)
(1,2)\cup(3,4) ~ (1,4)
1,2 \text{ and } 3 ~ 1,2
1;2;3 ~ 1;2
1;2 ~ 1.2
x^2=4 ~ x=2
x=2y ~ y=2x
x=y ~ x=-y
x=y=z ~ x=y
a=b, c=d ~ a=b
a<b ~ b<a
a\le b ~ a<b
a:b=1:2 ~ a:b=2:1
a:b:c=1:2:3 ~ a:b=1:2
\frac{a}{b}=\frac12 ~ \frac{a}{b}=\frac13
3n+1, n\in\mathbb{N} ~ 3n+2, n\in\mathbb{N}
3n+1 \text{ for } n\ge0 ~ 3n+1 \text{ for } n\ge1
n=3k\text{ or }n=3k+1 ~ n=3k\text{ or }n=3k+2
n=3k\text{ or }n=3k+1 ~ n=3k
2\pi n+\frac{\pi}{6} ~ \pi n+\frac{\pi}{6}
x=2\pi n\pm\frac{\pi}{3} ~ x=2\pi n+\frac{\pi}{3}
f(x)=ax+b ~ f(x)=ax
f(x)=cx \text{ for any } c ~ f(x)=x
f(x)=cx \text{ for any } c ~ f(x)=cx
f(x)=0 \text{ and } f(x)=x^2 ~ f(x)=0
f(x)=0, f(x)=2-x ~ 0
f(n)=n ~ f(n)=n+1
P(x)=x^n ~ P(x)=0, P(x)=x^n
(p,q,r)=(2,3,5) ~ (p,q,r)=(3,2,5)
(2,3,5),(3,2,5) ~ (2,3,5)
(2,3),(3,2) ~ (2,3),(2,3)
(n,k)=(1,1),(3,2) ~ (n,k)=(1,1)
(m,n)=(1,2) \text{ or } (2,1) ~ (m,n)=(1,2)
1\text{ or }2 ~ 1
-1 ~ \pm1
0,1,-1 ~ 0,1
2^k ~ 2^k \text{ for } k\ge 1
2^k, k\ge1 ~ 2^k
2^k, k\ge1 ~ 2^k, k\ge2
\text{yes, } 5 ~ 5
\text{yes, } 5 ~ \text{yes, } 6
\text{No} ~ \text{Yes}
\text{Yes, when } n=2 ~ \text{Yes}
\text{when } n=2 ~ 2
n=2 \text{ only} ~ n=3 \text{ only}
\text{only } 2 ~ \text{only } 3
\text{none but } 2 ~ 2
\text{exactly } 3 ~ \text{at least } 3
\lceil \log_2 n\rceil ~ \lfloor\log_2 n\rfloor
\lceil \log_2 n\rceil ~ \log_2 n
\frac{1}{n}\sum_{i=1}^n a_i ~ \sum_{i=1}^n a_i
\frac{1}{n}\sum_{i=1}^n a_i ~ \frac1n
\prod_{i=1}^n a_i ~ \sum_{i=1}^n a_i
\max_{i} a_i ~ \min_i a_i
\underbrace{11\ldots1}_{n} ~ \underbrace{11\ldots1}_{m}
\underbrace{11\ldots1}_{n} ~ 11
11\ldots1 ~ 11
11\cdots1 ~ 11\cdots 12
0.1234\ldots ~ 0.1234
1+\frac12+\frac13+\cdots ~ 1+\frac12+\frac13
1+\frac{1}{2+\frac{1}{2+\cdots}} ~ 1+\frac{1}{2}
12:05 ~ 12:50
12\text{:}05 ~ 12
3\text{ hr }5\text{ min} ~ 3\text{ hr }50\text{ min}
5'10'' ~ 5'11''
30^\circ 15' ~ 30^\circ
45^\circ N ~ 45^\circ S
\text{\$5 per hour} ~ \text{\$6 per hour}
a+bi ~ a-bi
|z|=1 ~ |z|=2
\Re z ~ \Im z
\vec{a} ~ \vec{b}
\vec a+2\vec b ~ 2\vec a+\vec b
A^{-1} ~ A
A^T ~ A
\det A ~ A
x\times10^5 ~ x\times10^6
10\% \text{ increase} ~ 20\% \text{ increase}
\text{increases by } 10 ~ \text{decreases by } 10
\text{increases by } 10 ~ 10
5 \text{ mod } 7 ~ 5
5 \bmod 7 ~ 6 \bmod 7
\{5\} ~ 5,5
5,5 ~ 5
\{x:x^2<4\} ~ \{x:x^2<9\}
[-1,1]^2 ~ [-1,1]
\mathbb{Q} ~ \mathbb{R}
\mathbb{R}^+ ~ \mathbb{R}
\mathbb{R}^2 ~ \mathbb{R}^3
\mathbb{N} ~ \mathbb{Z}^+
O(n) ~ O(n^2)
\Theta(n\log n) ~ \Theta(n)
H_2O ~ HO_2
AB=5 ~ AC=5
f(2)=4 ~ f(3)=4
f(x)=2x ~ f(2)=2x
f(x)=2x ~ f(x,y)=2x
|\vec{a}|=2 ~ \vec{a}=2
10\text{ a.m.} ~ 10\text{ p.m.}
10\text{ am} ~ 10\text{ pm}
a=b=c ~ c
a=b=c ~ a=c
a=b=c=1 ~ a=1,b=1
\{x|1<x<2\} ~ [1,2]
\{x|1<x<2\} ~ \{1,2\}
\{y|1<x<2\} ~ \{x|1<x<2\}
\{x|1<x<2\} ~ 1<y<2
(\pm1,0) ~ (1,0)
(\pm1,0) ~ (0,\pm1)
(\pm1,0) ~ \pm1
\mathbb{R}\setminus\{0,1\} ~ \mathbb{R}\setminus\{0\}
\mathbb{R}\setminus\{0,1\} ~ (-\infty,0)\cup(1,\infty)
CO_2 ~ CO
0/0 ~ 0
n2^n ~ 2n^2
(n+1)2^n ~ (n+1)^n2
\sqrt{n^2} ~ n
\sqrt{p^2q^2} ~ pq
(a^2)^{1/2} ~ a
\ln|xy| ~ \ln(xy)
\ln|n| ~ \ln n
(AB)^T ~ A^TB^T
\frac{(-1)^n}{n!} ~ \frac{1}{n!}
(-1)^{n+k}\binom{n}{k} ~ \binom{n}{k}
(-1)^{m+n}n!m! ~ n!m!
A ~ A_2
6:05\text{ am} ~ 6:05\text{ pm}
B,E ~ B\text{ or }E
(1,2,4) ~ c=1,b=2,a=4
\frac12\ln|x^2-1|+C ~ \frac12\ln(x^2-1)+C
\ln|\tan x| ~ \ln\tan x
\ln|x-a|+C ~ \ln(x-a)+C
\log|x| ~ \log x
x^{1/2} ~ |x|^{1/2}
\lnot p\lor q ~ \lnot p\land q
p\land q\land r ~ p\lor q\lor r
x=\frac\pi4+k\pi ~ x=\frac\pi4+2k\pi
x=\frac\pi4+k\pi, k\in\mathbb{Z} ~ x=\frac\pi4+k\pi, k\in\mathbb{R}
\left\{\frac\pi4+k\pi\mid k\in\mathbb{Z}\right\} ~ \left\{\frac\pi4+k\pi\mid k\in\mathbb{N}\right\}
x=\frac{k\pi}{2} ~ x=\frac{k\pi}{4}
y = m\pi x ~ y=n\pi x
S=\pi n^2 ~ S=\pi k^2
n\equiv0,1\pmod4 ~ n\equiv0,1,2\pmod4
n\equiv0,1\pmod4 ~ n\equiv 0\pmod 4, n\equiv1\pmod5
n\bmod4\in\{0,1\} ~ n\bmod4\in\{0,2\}
n=0\text{ or }n\equiv1\pmod4 ~ n\equiv0\text{ or }n\equiv1\pmod4
\text{all real numbers} ~ \text{all real numbers greater than }1
\text{all real numbers} ~ \text{some real number}
\text{the set of all integers} ~ \text{the set of all primes}
101_{\text{base }2} ~ 101_{\text{base }3}
101_2 ~ 101_{10}
101_2 ~ 1010_2
5\text{ million} ~ 5\text{ thousand}
\text{5 million} ~ \text{6 million}
5\text{ million} ~ 5\text{ million}^2
3\text{ dozen} ~ 3
(1,2),(2,1) ~ x=1,y=2\text{ or }x=1,y=2
(1,2),(2,1) ~ x=1\text{ or }y=2\text{ and }x=2\text{ or }y=1
(1,2),(3,1) ~ x=2,y=1\text{ or }x=1,y=3
(1,2) ~ x=1\text{ or }y=2
(1,2) ~ x=1,y=2\text{ or }x=2,y=1
x=1,y=2\text{ or }x=2,y=1 ~ x=1,z=2\text{ or }x=2,z=1
\frac13\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}\frac13&2\\3&4\end{pmatrix}
-\frac12\begin{pmatrix}1\\3\end{pmatrix} ~ \begin{pmatrix}-\frac12\\\frac32\end{pmatrix}
\frac12(1,3) ~ (1,3)
\{x\in\mathbb{R}:x>2\} ~ \{x\in\mathbb{Q}:x>2\}
\{x>2\} ~ \{2\}
\{x\mid x>2\} ~ \{x\mid x<2\}
\{x\in\mathbb{C}:x^2=-1\} ~ \{x\in\mathbb{R}:x^2=-1\}
3:30 ~ 15:30
3:30\text{ pm} ~ 3:30\text{ am}
3:30 ~ 330
3:30 ~ 3.30
A, C ~ A, D
AC ~ CB
A, C ~ A, C, D
A\&C ~ A
2\sqrt3m ~ 2\sqrt3n
2\sqrt3m^2 ~ 2\sqrt2m^2
2\sqrt3 x^2 ~ 2\sqrt3
2\sqrt3 e ~ 2\sqrt3
2\sqrt3 i ~ 2\sqrt3
\ln\sqrt2 ~ \ln\sqrt3
\ln\sqrt2 ~ \sqrt{\ln2}
\frac12\ln2 ~ \ln\frac12
\log_{10}\sqrt2 ~ \ln\sqrt2
10^3 ~ 3^{10}
10^3 ~ 10\cdot3
10^{3} ~ 1003
0.333\ldots ~ 0.3333
0.333\ldots ~ 0.334
0.33\ldots ~ 0.33
1.999\ldots ~ 1.999
0.1010010001\ldots ~ \frac{10}{99}
3.14159\ldots ~ \pi
1.414\ldots ~ \sqrt2
0.123123\ldots ~ 0.123
\ln|x| ~ |\ln x|
\ln|x| ~ \ln(-x)
|\ln x| ~ \ln x
\sqrt{x}^2 ~ |x|
\ln x^2 ~ \ln x
\ln|f(x)| ~ \ln f(x)
y=C|x| ~ y=Cx
\int \frac1x dx ~ \ln|x|
p\land q ~ p\to q
p\land q ~ pq
p\lor q ~ p+q
\neg(p\lor q) ~ \neg p\lor q
\neg(p\land q) ~ p\land q
p\oplus q ~ p\lor q
p\iff q ~ p\implies q
A\land B ~ A\lor B
x>1\land y>2 ~ x>1\lor y>2
x=1\lor x=2 ~ x=1
a\lor b\land c ~ (a\lor b)\land c
2^3\cdot3\cdot5 ~ 2\cdot3\cdot5
2^3\cdot3\cdot5 ~ 2^3\cdot3+5
\text{infinitely many} ~ \text{finitely many}
\text{neither} ~ \text{either}
\text{a} ~ \text{b}
\text{the first} ~ \text{the second}
\text{at least one} ~ \text{at most one}
\text{a is larger} ~ \text{b is larger}
\text{A is larger} ~ \text{B is larger}
\text{Both A and B} ~ \text{Neither A nor B}
\text{increasing} ~ \text{not increasing}
12:45\text{ am} ~ 12:45\text{ pm}
A,B,D ~ A\text{ or }B\text{ or }D
-\ln|\cos x|+C ~ -\ln(\cos x)+C
\ln|x+\sqrt{x^2-1}| ~ \ln(x+\sqrt{x^2-1})
p\land(q\lor r) ~ p\lor(q\land r)
b=2,a=1 ~ (2,1)
y=1, x=2 ~ (1,2)
3:30 \text{ am} ~ 3:30 \text{ pm}
\ln x ~ \ln|x|
\ln|x|+C ~ \ln x+C
\ln(x-1) ~ \ln|x-1|
\frac12\ln|2x+1| + C ~ \frac12\ln(2x+1)+C
\sqrt{|x|} ~ \sqrt{x}
p\lor q ~ p\land q
p \land \lnot q ~ p\lor\lnot q
p \lor q ~ p, q
(p \lor q) \land r ~ (p\land q)\lor r
(x=1 \text{ or } x=2) \text{ and } y=3 ~ (x=1 \text{ and } x=2) \text{ or } y=3
x\equiv1\pmod3\text{ and }x\equiv2\pmod5 ~ x\equiv1\pmod3\text{ or }x\equiv2\pmod5
3\text{ hundredths} ~ 3
7:15\text{ am} ~ 7:15\text{ pm}
1,2;3,4 ~ 1,3;2,4
\ln|x^2-1|+C ~ \ln(x^2-1)+C
\ln|\cos x| ~ \ln\cos x
y=\ln|x| ~ y=\ln x
\frac{\pi}{3}+2k\pi, k\in\mathbb{Z} ~ x=\frac{\pi}{3}+k\pi
\frac{\pi}{3}+2k\pi, k\in\mathbb{Z} ~ x=\frac{\pi}{3}
\frac{\pi}{3}+2k\pi, k\in\mathbb{N} ~ \frac{\pi}{3}+2k\pi, k\in\mathbb{Z}
x=\frac{\pi}{2}+n\pi \text{ for even } n ~ x=\frac{\pi}{2}+n\pi
n\equiv 0,1 \pmod 4 ~ n \equiv 0,3 \pmod 4
n\equiv 0,1 \pmod 4 ~ n\equiv 1 \pmod 4
n\equiv 0,1 \pmod 4 ~ n \equiv 0,1 \pmod 5
n\equiv 0,1 \pmod 4 ~ 0, 1
n\equiv 0,1 \pmod 4 ~ m \equiv 0,1 \pmod 4
n\equiv 0 \text{ and } n\equiv 1\pmod 4 ~ n\equiv 0\pmod 4
n\equiv 0\pmod 4 \text{ or } n\equiv 1 \pmod 3 ~ n\equiv 0,1\pmod 4
p \equiv \pm 1 \pmod 8 ~ p\equiv 1,3\pmod 8
p \equiv \pm 1 \pmod 8 ~ p\equiv 1\pmod 8
n\not\equiv 1 \pmod 3 ~ n \equiv 1 \pmod 3
\text{all real numbers} ~ \text{all rational numbers}
\text{all real numbers} ~ \mathbb{Z}
\text{all real numbers except } 0 ~ \mathbb{R}
\text{all nonzero real numbers} ~ \text{all real numbers}
\text{all positive integers} ~ \text{all integers}
\text{all positive integers} ~ \mathbb{R}^+
\text{all nonnegative integers} ~ \text{all positive integers}
\text{all primes} ~ \text{all odd primes}
101_2 ~ 101_{(3)}
101_{\text{two}} ~ 101_{\text{three}}
101_2 ~ 110_{\text{two}}
101_2 ~ 5
5 \text{ million} ~ 5 \text{ billion}
5 \text{ million} ~ 5
5 \text{ million} ~ 500000
2 \text{ hundred} ~ 2000
5\text{ millionths} ~ 5000000
x=1,y=2 \text{ or } x=2,y=1 ~ (1,2)
x=1,y=2 \text{ or } x=2,y=1 ~ (1,2),(2,2)
x=1,y=2 \text{ or } x=3,y=4 ~ (2,1),(4,3)
\frac13\begin{pmatrix}1&2\\3&5\end{pmatrix} ~ \begin{pmatrix}1/3&2/3\\1&4/3\end{pmatrix}
\frac13\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\{x\in\mathbb{R}: x>2\} ~ x\ge 2
\{x\in\mathbb{Z}: x>2\} ~ x>2
\{x\in\mathbb{R}: x>2\} ~ x<2
\{x \in \mathbb{N} \mid x > 2\} ~ \{x\in\mathbb{R} \mid x>2\}
3:30 ~ 3:03
3:30 \text{ pm} ~ 4:30\text{ pm}
3{:}30 ~ \frac{3}{30}
AC ~ A, B
A, C ~ A
A, C ~ ABC
A, C ~ BC
A \text{ or } C ~ A \text{ and } C
2\sqrt3 m ~ 3\sqrt2 m
2\sqrt3\text{ m} ~ 2
2\sqrt3 x ~ 2\sqrt3
2\sqrt3\pi ~ 2\sqrt3
\frac12\ln 2 ~ \ln 2
\ln\sqrt 2 ~ \ln 2
\ln \sqrt2 ~ \sqrt{\ln 2}
\log\sqrt2 ~ \ln\sqrt2
10^3 ~ 10^4
10^3 ~ 100
10^{-3} ~ 1000
10 \cdot 3 ~ 10^3
0.333\ldots ~ 0.333
0.333\ldots ~ 0.3
0.1666\ldots ~ 0.1666
0.1666\ldots ~ \frac{1}{66}
0.3434\ldots ~ \frac{1}{3}
\neg p ~ p
p\to q ~ q \to p
p \land q \to r ~ p\lor q\to r
-\frac14 ~ \frac14
\frac{3\sqrt5}{5} ~ \frac{5\sqrt3}{5}
6\sqrt2-4 ~ 4-6\sqrt2
\theta=\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~ \theta=\frac{\pi}{6}+2k\pi, k\in\mathbb{Z}
\theta=\frac{\pi}{6}+k\pi, k\in\mathbb{Z} ~ \frac{\pi}{6}
V=\pi k^2 ~ V=\pi n^2
V = \pi m^2 h ~ V=\pi n^2 h
n\equiv 2,4\pmod 6 ~ n\equiv 2,3 \pmod 6
n\equiv 2,4\pmod 6 ~ n\equiv 2,4,0\pmod 6
n\equiv\pm2\pmod 6 ~ n\equiv 2\pmod6
x\equiv1\pmod3, x\equiv2\pmod5 ~ x\equiv 2\pmod3, x\equiv 1\pmod 5
\text{all positive integers} ~ \text{all nonnegative integers}
\text{all positive real numbers} ~ \text{all nonnegative real numbers}
\text{all positive real numbers} ~ \text{all positive integers}
\text{all rational numbers} ~ \text{all irrational numbers}
\text{all even integers} ~ \text{all integers}
\text{all real numbers} ~ \text{no real numbers}
\text{all integers } n\ge 2 ~ \text{all integers}
\text{any integer} ~ \text{any odd integer}
2102_3 ~ 2102_4
2102_3 ~ 2012_3
A5_{12} ~ B5_{12}
A5_{12} ~ A5_{16}
A5_{12} ~ 125
3.2\text{ million} ~ 3.2\text{ thousand}
3.2\text{ million} ~ 3.2
3\text{ hundredths} ~ 300
(2,5),(5,2) ~ x=2,y=5
(2,5),(5,2) ~ x=2,y=5\text{ or }x=2,y=2
(2,5),(7,3) ~ x=5,y=2\text{ or }x=3,y=7
x=2,5\text{ or }y=3 ~ x=2\text{ or }y=5,3
\frac17\begin{pmatrix}2&1\\3&5\end{pmatrix} ~ \frac17\begin{pmatrix}2&1\\3&6\end{pmatrix}
\frac17\begin{pmatrix}2&1\\3&5\end{pmatrix} ~ 7\begin{pmatrix}2&1\\3&5\end{pmatrix}
\{x\mid x\ne-3\} ~ \{x\mid x\ne3\}
\{x\mid x\ne-3\} ~ x=-3
x\ge2, x\ne3 ~ x\ge2
x\ge2, x\ne3 ~ x>2
x\ge 2\text{ or }x\ne3 ~ x\ge2\text{ and }x\ne3
-2<x<0\text{ or }x>3 ~ -2<x<3
7:15 ~ 7:50
B, C ~ B, D
B, C ~ B
BAC ~ A,B,C,D
5\sqrt2 cm ~ 2\sqrt5 cm
36\pi h ~ 36\pi r
\frac13\ln5 ~ \ln\frac53
\log_2\sqrt3 ~ \log_3\sqrt2
10^{-2} ~ 10^2
10^5 ~ 10^6
0.666\ldots ~ 0.666
0.666\ldots ~ \frac{3}{5}
\lceil\frac n2\rceil ~ \lfloor\frac n2\rfloor
[\frac n2]+1 ~ \frac n2+1
n\text{ is prime} ~ n\text{ is composite}
n\text{ is prime} ~ n\text{ is an odd prime}
(-\frac12,\frac32) ~ [-\frac12,\frac32]
]1,2[ ~ [1,2]
2\text{ hours }30\text{ minutes} ~ 2\text{ hours }45\text{ minutes}
2\text{ hours }30\text{ minutes} ~ 2
5\text{ to }3 ~ 3\text{ to }5
p\lor\lnot q ~ p\lor q
p\lor(q\land r) ~ (p\lor q)\land r
(1,-2,3)^T ~ (1,2,3)^T
\begin{pmatrix}1&2\\3&4\end{pmatrix}^T ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
x\in\{1,2\} ~ x\in(1,2)
\{x\in\mathbb{Z}\mid x>2\} ~ \{x\in\mathbb{R}\mid x>2\}
C(20,10) ~ C(10,20)
C(20,10) ~ (20,10)
C(5,2) ~ (5,2)
A(1,2), B(3,4), C(6,5) ~ A(1,2), B(3,4), C(6,1)
{}_{20}C_{10} ~ {}_{20}C_{9}
C_n ~ \binom{n}{1}
C_{10} ~ 10
C(n,2) ~ \frac{n(n+1)}{2}
n \bmod 4 = 1 ~ n = 1
n \bmod 4 = 1 ~ n \bmod 4 = 3
n\bmod4\in\{0,1\} ~ n\equiv 0 \pmod 4
n\bmod4\in\{0,1\} ~ n\equiv 0,1 \pmod 5
n\equiv\{0,1\}\pmod 4 ~ \{0,1\}
n\bmod4\in\{0,1\} ~ m\bmod4\in\{0,1\}
\pm(2,3) ~ (\pm2,\pm3)
\pm(2,3) ~ (2,3)
\pm(2,3) ~ (2,3),(-2,3)
\pm(2,3) ~ (2,3),(3,2)
\mp(2,3) ~ (2,-3),(-2,3)
|x|<2 ~ x<2
|x|<2 ~ (0,2)
|x|<2 ~ [0,2)
|x|<2 ~ (-2,0)\cup(0,2)
|x|>2 ~ x>2
|x|>2 ~ (-2,2)
|x|\ge2 ~ |x|>2
|x|\le2 ~ |y|\le2
|x|\ne 2 ~ x\ne2
|z|<1 ~ (-1,1)
|z|<1 ~ -1<z<1
|x-1|<2 ~ |x|<2
|x-1|<2 ~ (-2,2)
1<|x|<2 ~ 1<x<2
1<|x|<2 ~ (-2,2)
1<|x|\le2 ~ [-2,-1]\cup[1,2]
\text{five} ~ 6
\text{five} ~ 15
\text{five} ~ \text{fifth}
\text{twenty-one} ~ 201
\text{twenty one} ~ \text{twenty}
\text{one hundred five} ~ 150
\text{one two} ~ 3
\text{two thousand} ~ 2
\text{two and three} ~ 5
\text{two} ~ \text{two or three}
\text{zero} ~ \text{none or one}
\text{five million} ~ 5
\text{one half} ~ 1
\text{hundred} ~ 1
\operatorname{cis} 40^\circ ~ \cos 40^\circ
\operatorname{cis} 40^\circ ~ \operatorname{cis} 50^\circ
\operatorname{cis} 40^\circ ~ 40
2\operatorname{cis} 40^\circ ~ \operatorname{cis} 40^\circ
e^{i\pi/3} ~ \frac{1}{2}
e^{i\pi/3} ~ \frac{\sqrt3}{2}+\frac12 i
2e^{i\pi/3} ~ 1-i\sqrt3
\frac{2\pm\sqrt8}{2} ~ 1\pm\sqrt8
1\pm\sqrt2 ~ 2\pm\sqrt2
x^2+y^2=16 ~ x^2+y^2=4
x^2+y^2=4^2 ~ x^2+y^2=4
x^2+y^2=2^3 ~ x^2+y^2=9
\{-2,3\} ~ x_1=-2,y_1=3
\{-2,3\} ~ x_1=-2,x_2=-3
(-2,3) ~ x_1=3,x_2=-2
\{-2,3\} ~ x_1=-2
x_1=-2,x_2=3 ~ x_1=3,x_2=-2
m=1 ~ n=1
m=1 ~ m=n=2
\mathbb{R}\setminus\{2,5\} ~ (-\infty,2)\cup(5,\infty)
\mathbb{R}\setminus\{2,5\} ~ (-\infty,2)\cup(2,\infty)
(2,5)\cup(5,\infty) ~ \mathbb{R}\setminus\{5\}
\text{all } n\ge4 ~ n\ge 3
\text{all } n\ge4 ~ \text{all even } n\ge4
\text{all even } n ~ n
\text{All real values of } x ~ \text{all positive real values of } x
\text{all real values} ~ \text{all integer values}
C(2,3) ~ 0
C_1e^x+x^2C_2 ~ C_1e^x+1
x^2C_2 ~ x
2^nC_1 ~ n
e^{2}C_1 ~ 2
(x)^2C_1 ~ x
m=n=1 ~ m=1
x=y=z=2 ~ y=2
1\pm\sqrt2 ~ 1\pm\sqrt3
\lfloor x\rfloor ~ [x]
xy=6 ~ x+y=6
xyz=6 ~ x+y+z=6
x_1+x_2=5 ~ x_1x_2=5
x-y=2 ~ x+y=2
x-y=2 ~ y-x=2
xy=\sqrt6 ~ x+y=\sqrt6
x_1+x_2=\sqrt5 ~ x_1x_2=\sqrt5
AB+BC=5 ~ AC=5
\overline{AB}=5 ~ \overline{AC}=5
P(A)=\frac13 ~ P(B)=\frac13
f(2)=4 ~ g(2)=4
42=y ~ x=42
42=AB ~ AC=42
OR=5 ~ OP=5
AS=5 ~ AT=5
\angle A=60^\circ ~ \angle B=60^\circ
\sin x=\frac12 ~ \cos x=\frac12
\sin x=\frac12 ~ \sin y=\frac12
x_1=3 ~ x_2=3
a_n=5 ~ b_n=5
|x|=3 ~ x=3
|x|=3 ~ |y|=3
\frac{a}{b}=2 ~ ab=2
\frac{a}{b}=2 ~ \frac{b}{a}=2
\alpha=2 ~ \beta=2
f'(1)=3 ~ f(1)=3
x=1\text{ or }y=2 ~ x=1,y=2
x=1\text{ or }y=2 ~ x=1\text{ and }y=2
y=2 ~ y-x=2
xy=\sqrt6 ~ x=\sqrt6
f(x)=5 ~ x=5
\text{all real numbers except }3 ~ \text{all real numbers}
\text{all real numbers except }3 ~ \text{all real numbers except }-3
\text{all real numbers except }3 ~ \text{all integers except }3
\text{all real numbers except }3\text{ and }4 ~ x\ne3
f(x)=cx\text{ for any constant }c ~ f(x)=cx\text{ for any constant }c>0
f(x)=cx\text{ for any constant }c ~ f(x)=cx, c\in\mathbb{Z}
f(x)=cx\text{ for any constant }c ~ f(x)=c\text{ for any constant }c
f(x)=cx\text{ for any constant }c ~ f(x)=x
f(x)=cx\text{ for any constant }c ~ f(x)=cx
5\text{ for any constant }c ~ 5
f(x)=x\text{ for all }x>0 ~ f(x)=x
3\mathbf{i}-4\mathbf{j} ~ (-4,3)
3\mathbf{i}-4\mathbf{j} ~ (3,-4,1)
2\mathbf{i}-\mathbf{k} ~ (2,-1)
3\mathbf{i}-4\mathbf{j} ~ \{3,-4\}
\text{none} ~ 0
\text{none} ~ \text{infinitely many}
\$24 ~ 24\text{ cents}
\$4.50 ~ 4\text{ dollars and }5\text{ cents}
\$0.75 ~ 0.75\text{ cents}
45\text{ cm} ~ 45\text{ m}
2\text{ kg} ~ 2\text{ g}
5\text{ feet} ~ 5\text{ inches}
3\text{ days} ~ 3\text{ hours}
4\text{ liters} ~ 4\text{ mL}
30\text{ km/h} ~ 30\text{ mph}
40\text{ m}^2 ~ 40\text{ cm}^2
5\sqrt2\text{ cm} ~ 5\sqrt2\text{ mm}
8\pi\text{ m}^2 ~ 8\pi\text{ cm}^2
75^\circ ~ 75\text{ radians}
\frac{5\pi}{6} ~ \frac{5\pi}{6}^\circ
2\text{ hours }30\text{ minutes} ~ 230\text{ minutes}
10:00\text{ a.m.} ~ 10\text{ p.m.}
1:4 ~ 4:1
3:20 ~ \frac{3}{20}
[3,\infty) ~ \text{all real numbers greater than }3
[3,\infty) ~ \text{all integers at least }3
(2,5) ~ \text{between 2 and 5}
(2,5) ~ \text{between 2 and 5, inclusive}
(0,5) ~ \text{all real numbers less than }5
7 ~ \text{at least }7
x>4 ~ y\text{ is greater than }4
x>2 ~ \text{all real numbers greater than 2 and less than 9}
n\equiv0\pmod3 ~ n\mid3
n\equiv0\pmod3 ~ 3\nmid n
n\equiv0\pmod3 ~ 3\mid m
3\mid n ~ n\text{ is not divisible by }3
3\mid n ~ 6\mid n
n\text{ is even} ~ n=2k+1
n\text{ is odd} ~ n\equiv1\pmod4
x\equiv11\pmod{30} ~ x=30k+12
x\equiv11\pmod{30} ~ x=60k+11
x\equiv11\pmod{30} ~ x=30k^2+11
x\equiv11\pmod{30} ~ x=30k+11, k\in\mathbb{N}
x\equiv11\pmod{30} ~ x=30k+11, k\ge1
x\equiv11\pmod{30} ~ x=30x+11
x\equiv11\pmod{30} ~ y=30k+11
n=4k+1 ~ n=4m+1
n=6k\pm1 ~ n\equiv1\pmod6
n\equiv\pm1\pmod6 ~ n=3k\pm1
n\equiv0,1\pmod3 ~ n=3k\text{ or }n=3k+2
x\equiv1\pmod3,x\equiv2\pmod5 ~ x\equiv1,2\pmod{15}
n\text{ is a perfect square} ~ n\text{ is a perfect cube}
n\text{ is a perfect square} ~ m\text{ is a perfect square}
n\text{ is a perfect square} ~ n=2k
n\text{ is a perfect square} ~ n=k
\text{Alice and Carol} ~ \text{Alice or Carol}
\text{Alice and Carol} ~ \text{Carol}
\text{Alice and Carol} ~ \text{Alice, Bob and Carol}
f(x)=x\text{ for all }x>0 ~ f(x)=x
f(x)=x\text{ for all }x\in\mathbb{Z} ~ f(x)=x
""".strip().splitlines()
]
"""Two answers, neither of which is right for the other."""

QUESTIONS = [
    ("Expand $(x+10)(2y+10)$.", "(x+10)(2y+10)", "2xy+10x+20y+100", 0),
    ("Expand $(x+10)(2y+10)$.", "(2y+10)(x+10)", "2xy+10x+20y+100", 0),
    ("Expand $(x+10)(2y+10)$.", "2(x+10)(y+5)", "2xy+10x+20y+100", 0),
    ("Expand $(x+10)(2y+10)$.", "100+20y+10x+2xy", "2xy+10x+20y+100", 1),
    ("Expand (x+10)(2y+10).", "(x+10)(2y+10)", "2xy+10x+20y+100", 0),
    ("Multiply: $(x+10)(2y+10)$.", "(10+x)(10+2y)", "2xy+10x+20y+100", 0),
    ("Factor $x^2-5x+6$.", "x^2-5x+6", "(x-2)(x-3)", 0),
    ("Factor $x^2-5x+6$.", "6+x^2-5x", "(x-2)(x-3)", 0),
    ("Factor $x^2-5x+6$.", "x(x-5)+6", "(x-2)(x-3)", 0),
    ("Factor $x^2-5x+6$.", "(x-3)(x-2)", "(x-2)(x-3)", 1),
    ("Factor $x^2-5x+6$.", "(3-x)(2-x)", "(x-2)(x-3)", 1),
    ("Factor $x^2-5x+6$.", "(x^2-5x+6)", "(x-2)(x-3)", 0),
    ("Factor $x^2-5x+6$.", "1(x^2-5x+6)", "(x-2)(x-3)", 0),
    ("Factor $x^2-5x+6$.", "2(\\frac{x^2}{2}-\\frac{5x}{2}+3)", "(x-2)(x-3)", 0),
    ("Factor completely: $x^3-x$", "x(x^2-1)", "x(x-1)(x+1)", 0),
    ("Factor completely: $x^3-x$", "x(x+1)(x-1)", "x(x-1)(x+1)", 1),
    ("Expand $(x-2)(x-3)$", "x^2-5x+6", "x^2-5x+6", 1),
    ("Expand $(x-2)(x-3)$", "6-5x+x^2", "x^2-5x+6", 1),
    ("Expand $(x-2)(x-3)$", "(x-2)(x-3)", "x^2-5x+6", 0),
    ("Expand $(x-2)(x-3)$", "x^2-2x-3x+6", "x^2-5x+6", 0),
    ("Expand $(x-2)(x-3)$", "x(x-3)-2(x-3)", "x^2-5x+6", 0),
    ("Expand $(x-2)(x-3)$", "x(x-5)+6", "x^2-5x+6", 0),
    ("Simplify $(3x^2-2x)-(x^2-5x)$.", "(3x^2-2x)-(x^2-5x)", "2x^2+3x", 0),
    ("Simplify $(3x^2-2x)-(x^2-5x)$.", "3x^2-2x-x^2+5x", "2x^2+3x", 0),
    ("Simplify $(3x^2-2x)-(x^2-5x)$.", "x(2x+3)", "2x^2+3x", 1),
    ("Simplify $(3x^2-2x)-(x^2-5x)$.", "3x+2x^2", "2x^2+3x", 1),
    ("Simplify $\\frac{x^2-1}{x-1}$.", "\\frac{x^2-1}{x-1}", "x+1", 0),
    ("Simplify $\\frac{x^2-1}{x-1}$.", "(x^2-1)/(x-1)", "x+1", 0),
    ("Simplify $\\frac{x^2-1}{x-1}$.", "\\frac{(x-1)(x+1)}{x-1}", "x+1", 0),
    ("Simplify $\\frac{x^2-1}{x-1}$.", "1+x", "x+1", 1),
    ("", "\\frac{x^2-1}{x-1}", "x+1", 0),
    ("", "(3x^2-2x)-(x^2-5x)", "2x^2+3x", 0),
    ("Simplify $\\sqrt{12}$", "\\sqrt{12}", "2\\sqrt{3}", 0),
    ("Simplify $\\sqrt{12}$", "2\\sqrt{3}", "2\\sqrt{3}", 1),
    ("Simplify $\\sqrt{12}$", "12^{1/2}", "2\\sqrt{3}", 0),
    ("Rationalize the denominator of $\\frac{1}{\\sqrt{2}}$", "\\frac{1}{\\sqrt2}", "\\frac{\\sqrt{2}}{2}", 0),
    ("Rationalize the denominator of $\\frac{5}{\\sqrt{8}}$", "\\frac{5}{2\\sqrt2}", "\\frac{5\\sqrt{2}}{4}", 0),
    ("Rationalize the denominator of $\\frac{1}{\\sqrt{2}}$", "\\frac12\\sqrt2", "\\frac{\\sqrt{2}}{2}", 1),
    ("Compute $(1+\\sqrt2)^2$", "(1+\\sqrt2)^2", "3+2\\sqrt2", 0),
    ("Solve $x^2=4$", "x^2=4", "x=2, x=-2", 0),
    ("Solve $x^2=4$", "x=\\pm2", "x=2, x=-2", 1),
    ("Solve $2x+1>7$", "2x+1>7", "x>3", 0),
    ("Write $x>3$ in interval notation", "x>3", "(3,\\infty)", 0),
    ("Solve $2x>6$", "x>3", "(3,\\infty)", 1),
    ("Find a polynomial with roots 2,3", "(x-2)(x-3)", "x^2-5x+6", 1),
    ("What is the sum $1+2+\\cdots+n$?", "1+2+\\cdots+n", "\\frac{n(n+1)}{2}", 0),
    ("What is $\\binom{n}{2}$ as polynomial?", "\\binom{n}{2}", "\\frac{n(n-1)}{2}", 0),
    ("Write $y-2=3(x-1)$ in slope-intercept form", "y-2=3(x-1)", "y=3x-1", 0),
    ("Write $2x-y=-1$ in slope-intercept form", "y=2x+1", "y=2x+1", 1),
    ("Write $y=2x+1$ in standard form", "y=2x+1", "2x-y=-1", 0),
    ("By what factor does it grow, for $x$ years at 1+r?", "(r+1)^2", "1+2r+r^2", 1),
    ("Express $0.5x$ ...", "\\frac{x}{2}", "0.5x", 1),
    ("Combine $\\frac1x+\\frac1y$ as a single fraction", "\\frac1x+\\frac1y", "\\frac{x+y}{xy}", 0),
    ("Combine $\\frac1x+\\frac1y$ as a single fraction", "\\frac1y+\\frac1x", "\\frac{x+y}{xy}", 0),
    ("Combine $\\frac1x+\\frac1y$ as a single fraction", "\\frac{y+x}{xy}", "\\frac{x+y}{xy}", 1),
    ("Which of $\\{3,5,7,9\\}$ are prime? Is it $\\{3,5,7\\}$?", "\\{3,5,7\\}", "3,5,7", 1),
    ("what percent is 5 of 10?", "50\\%", "50", 1),
    ("what is 7% of 100?", "7\\%", "7", 0),
    ("how many?", "7\\%", "7", 0),
    ("Differentiate $x^3$", "\\frac{d}{dx}x^3", "3x^2", 0),
    ("Differentiate $x^3$", "(x^3)'", "3x^2", 0),
    ("Convert 3\\frac12 to improper", "\\frac72", "3.5", 1),
    ("Find the derivative of $x^2\\sin x$", "x^2\\cos x+2x\\sin x", "2x\\sin x+x^2\\cos x", 1),
    ("Find the derivative of $x^2\\sin x$", "x(x\\cos x+2\\sin x)", "2x\\sin x+x^2\\cos x", 1),
    ("Complete the square: $x^2+6x+5$", "x^2+6x+5", "(x+3)^2-4", 0),
    ("Complete the square: $x^2+6x+5$", "(x+1)(x+5)", "(x+3)^2-4", 0),
    ("Complete the square: $x^2+6x+5$", "-4+(x+3)^2", "(x+3)^2-4", 1),
    ("Evaluate $\\log_2 8x$", "\\log_2 8+\\log_2 x", "3+\\log_2 x", 0),
    ("Simplify $\\sin^2x+\\cos^2x+x$", "\\sin^2x+\\cos^2x+x", "1+x", 0),
    ("Simplify $a^2\\cdot a^3$", "a^2\\cdot a^3", "a^5", 0),
    ("Simplify $a^2\\cdot a^3$", "a^{2+3}", "a^5", 0),
    ("Simplify $a^2 a^3$", "a^3 a^2", "a^5", 0),
    ("Simplify $(a^2)^3$", "(a^2)^3", "a^6", 0),
    ("Simplify $2x+3x$", "3x+2x", "5x", 0),
    ("Simplify $2x+3x$", "(2+3)x", "5x", 0),
    ("Simplify $2(x+3)-4$", "2(x+1)", "2x+2", 1),
    ("Let f(x)=x+1. Find f(f(x)).", "f(f(x))=x+2", "x+2", 1),
    ("Let f(x)=x+1. Find f(f(x)).", "(x+1)+1", "x+2", 0),
    ("Simplify $\\frac{6x^2+3x}{3x}$", "\\frac{6x^2+3x}{3x}", "2x+1", 0),
    ("Simplify $\\frac{6x^2+3x}{3x}$", "\\frac{3x(2x+1)}{3x}", "2x+1", 0),
    ("Simplify $\\frac{6x^2+3x}{3x}$", "\\frac{6x+3}{3}", "2x+1", 0),
    ("Simplify $\\frac{6x^2+3x}{3x}$", "2(x+\\frac12)", "2x+1", 1),
    ("Evaluate $\\sqrt{50}+\\sqrt{8}$", "\\sqrt{50}+\\sqrt{8}", "7\\sqrt2", 0),
    ("Evaluate $\\sqrt{50}+\\sqrt{8}$", "\\sqrt{8}+\\sqrt{50}", "7\\sqrt2", 0),
    ("Evaluate $\\sqrt{50}+\\sqrt{8}$", "5\\sqrt2+2\\sqrt2", "7\\sqrt2", 0),
    ("Evaluate $\\sqrt{50}+\\sqrt{8}$", "\\sqrt{98}", "7\\sqrt2", 1),
    ("Compute $(2+3i)(1-i)$", "(2+3i)(1-i)", "5+i", 0),
    ("Compute $(2+3i)(1-i)$", "(1-i)(2+3i)", "5+i", 0),
    ("Compute $(2+3i)(1-i)$", "i+5", "5+i", 1),
    ("Compute $(2+3i)(1-i)$", "2-2i+3i+3", "5+i", 0),
    ("Compute the product $\\sqrt3\\cdot\\sqrt5$", "\\sqrt3\\cdot\\sqrt5", "\\sqrt{15}", 0),
    ("Compute the product $\\sqrt3\\cdot\\sqrt5$", "\\sqrt5\\sqrt3", "\\sqrt{15}", 0),
    ("Find $\\frac{d}{dx}(x^2+1)^3$", "6x(x^2+1)^2", "6x(x^2+1)^2", 1),
    ("Find $\\frac{d}{dx}(x^2+1)^3$", "3(x^2+1)^2\\cdot 2x", "6x(x^2+1)^2", 0),
    ("Find $\\int 2x\\,dx$", "x^2+C", "x^2+C", 1),
    ("Find $\\int 2x\\,dx$", "\\int 2x\\,dx", "x^2+C", 0),
    ("Write $\\frac{3}{x}-\\frac{1}{x+1}$ as a single fraction", "\\frac{2x+3}{x(x+1)}", "\\frac{2x+3}{x(x+1)}", 1),
    ("Write $\\frac{3}{x}-\\frac{1}{x+1}$ as a single fraction", "\\frac{2x+3}{x^2+x}", "\\frac{2x+3}{x(x+1)}", 1),
    ("Write $\\frac{3}{x}-\\frac{1}{x+1}$ as a single fraction", "-\\frac{1}{1+x}+\\frac3x", "\\frac{2x+3}{x(x+1)}", 0),
    ("Write $\\frac{3}{x}-\\frac{1}{x+1}$ as a single fraction", "\\frac{3(x+1)-x}{x(x+1)}", "\\frac{2x+3}{x(x+1)}", 0),
    (
        "Decompose $\\frac{1}{x^2-1}$ into partial fractions",
        "\\frac{1}{x^2-1}",
        "\\frac{1}{2(x-1)}-\\frac{1}{2(x+1)}",
        0,
    ),
    (
        "Decompose $\\frac{1}{x^2-1}$ into partial fractions",
        "\\frac{1}{(x-1)(x+1)}",
        "\\frac{1}{2(x-1)}-\\frac{1}{2(x+1)}",
        0,
    ),
    (
        "Decompose $\\frac{1}{x^2-1}$ into partial fractions",
        "\\frac{1/2}{x-1}-\\frac{1/2}{x+1}",
        "\\frac{1}{2(x-1)}-\\frac{1}{2(x+1)}",
        1,
    ),
    ("Express $\\sin 2x$ in terms of sin x and cos x", "\\sin 2x", "2\\sin x\\cos x", 0),
    ("Express $\\log 8 + \\log 5$ as a single logarithm", "\\log 8+\\log 5", "\\log 40", 0),
    ("Express $\\log 8 + \\log 5$ as a single logarithm", "\\log 40", "\\log 40", 1),
    ("Express $\\log 8 + \\log 5$ as a single logarithm", "\\log 5+\\log 8", "\\log 40", 0),
    ("Factor out the greatest common factor from $30x^2-45x$", "15x(2x-3)", "15x(2x-3)", 1),
    ("Factor out the greatest common factor from $30x^2-45x$", "5x(6x-9)", "15x(2x-3)", 0),
    ("Factor out the greatest common factor from $30x^2-45x$", "x(30x-45)", "15x(2x-3)", 0),
    ("Factor $4x^2-1$", "(2x-1)(2x+1)", "(2x-1)(2x+1)", 1),
    ("Factor $4x^2-1$", "4(x-\\frac12)(x+\\frac12)", "(2x-1)(2x+1)", 1),
    ("Factor $9y^2-30y+25$.", "(3y-5)^2", "(3y - 5)^2", 1),
    ("Factor $9y^2-30y+25$.", "(3y-5)(3y-5)", "(3y - 5)^2", 1),
    ("Factor $9y^2-30y+25$.", "(5-3y)^2", "(3y - 5)^2", 1),
    ("Factor $9y^2-30y+25$.", "9y^2-30y+25", "(3y - 5)^2", 0),
    ("Expand $(z^2-3z+3)(z^2+3z+3)$", "z^4-3z^2+9", "z^4-3z^2+9", 1),
    ("Expand $(z^2-3z+3)(z^2+3z+3)$", "(z^2+3)^2-9z^2", "z^4-3z^2+9", 0),
    ("Expand $(z^2-3z+3)(z^2+3z+3)$", "z^4+3z^3+3z^2-3z^3-9z^2-9z+3z^2+9z+9", "z^4-3z^2+9", 0),
    ("Simplify $(a^3b^2)^2$", "a^6b^4", "a^6b^4", 1),
    ("Simplify $(a^3b^2)^2$", "(a^3b^2)^2", "a^6b^4", 0),
    ("Simplify $(a^3b^2)^2$", "(b^2a^3)^2", "a^6b^4", 0),
    ("Simplify $(a^3b^2)^2$", "(a^3)^2(b^2)^2", "a^6b^4", 0),
    ("Simplify $(a^3b^2)^2$", "a^{3\\cdot2}b^{2\\cdot 2}", "a^6b^4", 0),
    ("Simplify $|x-3|$ for $x<3$", "3-x", "3-x", 1),
    ("Solve for y: 2x+3y=6", "y=\\frac{6-2x}{3}", "y=2-\\frac{2}{3}x", 1),
    ("Solve for y: 2x+3y=6", "2x+3y=6", "y=2-\\frac{2}{3}x", 0),
    ("Solve for y: 2x+3y=6", "3y=6-2x", "y=2-\\frac{2}{3}x", 0),
    ("Solve for y: 2x+3y=6", "\\frac{6-2x}{3}", "y=2-\\frac{2}{3}x", 1),
    ("Solve the system x+y=3, x-y=1", "x+y=3, x-y=1", "x=2, y=1", 0),
    ("Solve the system x+y=3, x-y=1", "(2,1)", "x=2, y=1", 1),
    ("Solve $|x|<3$", "|x|<3", "(-3,3)", 0),
    ("Solve $|x|<3$", "-3<x<3", "(-3,3)", 1),
    ("Solve $x^2<9$", "x^2<9", "(-3,3)", 0),
    ("Find all x with x^2=2", "x^2=2", "\\pm\\sqrt2", 0),
    ("Find all x with x^2=2", "\\pm\\sqrt2", "\\pm\\sqrt2", 1),
    ("Express 2^{10} \\cdot 2^5 as a power of 2", "2^{10}\\cdot2^5", "2^{15}", 0),
    ("Express 2^{10} \\cdot 2^5 as a power of 2", "2^{15}", "2^{15}", 1),
    ("What is (n+1)!/n! ?", "(n+1)!/n!", "n+1", 0),
    ("What is (n+1)!/n! ?", "\\frac{(n+1)!}{n!}", "n+1", 0),
    ("Find the inverse of f(x)=2x+1", "\\frac{x-1}{2}", "f^{-1}(x)=\\frac{x-1}{2}", 1),
    ("Let a=3b. Simplify a+b", "4b", "4b", 1),
    ("Let a=3b. Simplify a+b", "a+b", "4b", 0),
    (
        "Compute $\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}+\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}$",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}+\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}",
        "\\begin{pmatrix}2&2\\\\3&5\\end{pmatrix}",
        0,
    ),
    (
        "Compute $2\\begin{pmatrix}1\\\\3\\end{pmatrix}$",
        "2\\begin{pmatrix}1\\\\3\\end{pmatrix}",
        "\\begin{pmatrix}2\\\\6\\end{pmatrix}",
        0,
    ),
    (
        "Compute $2\\begin{pmatrix}1\\\\3\\end{pmatrix}$",
        "\\begin{pmatrix}2\\cdot1\\\\2\\cdot3\\end{pmatrix}",
        "\\begin{pmatrix}2\\\\6\\end{pmatrix}",
        0,
    ),
    ("Compute (1,2)+(3,4)", "(1,2)+(3,4)", "(4,6)", 0),
    ("Compute (1,2)+(3,4)", "(1+3,2+4)", "(4,6)", 0),
    ("Find \\{1,2\\}\\cup\\{2,3\\}", "\\{1,2\\}\\cup\\{2,3\\}", "\\{1,2,3\\}", 0),
    ("Find \\{1,2\\}\\cup\\{2,3\\}", "\\{1,2,2,3\\}", "\\{1,2,3\\}", 0),
    ("Find \\{1,2\\}\\cup\\{2,3\\}", "\\{3,2,1\\}", "\\{1,2,3\\}", 1),
    ("Is n^2 even? What is $n^2$ for $n=2k$?", "4k^2", "4k^2", 1),
    ("Is n^2 even? What is $n^2$ for $n=2k$?", "(2k)^2", "4k^2", 0),
    ("What is $3^{2}\\cdot x$?", "3^2x", "9x", 0),
    ("What fraction? $\\frac{4x}{6}$", "\\frac{4x}{6}", "\\frac{2x}{3}", 0),
    ("What fraction? $\\frac{4x}{6}$", "\\frac{2}{3}x", "\\frac{2x}{3}", 1),
    ("Simplify $\\frac{x^5}{x^2}$", "\\frac{x^5}{x^2}", "x^3", 0),
    ("Simplify $\\frac{x^5}{x^2}$", "x^{5-2}", "x^3", 0),
    ("Simplify $\\frac{x^5}{x^2}$", "x^5x^{-2}", "x^3", 0),
    ("Simplify $\\frac{x^5}{x^2}$", "x\\cdot x\\cdot x", "x^3", 1),
    ("Is $a=b=c=1$ the only one?", "1", "a=b=c=1", 0),
    ("Is $a=b=c=1$ the only one?", "a=1", "a=b=c=1", 0),
    ("When are they all 1?", "x_1=1", "x_1=x_2=\\cdots=x_n=1", 0),
    ("Convert $90^\\circ$ to radians.", "90\\cdot\\frac{\\pi}{180}", "\\frac{\\pi}{2}", 0),
    ("Convert $90^\\circ$ to radians.", "\\frac{\\pi}{180}\\cdot 90", "\\frac{\\pi}{2}", 0),
    ("Convert $120^\\circ$ to radians.", "2\\cdot\\frac{\\pi}{3}", "\\frac{2\\pi}{3}", 1),
    ("How long is it?", "6\\cdot\\frac{\\sqrt3}{2}", "3\\sqrt3", 0),
    ("Simplify $\\sqrt{50}+\\sqrt{18}$.", "\\sqrt{128}", "8\\sqrt2", 0),
    ("Simplify $\\sqrt{50}+\\sqrt{18}$.", "2\\sqrt{32}", "8\\sqrt2", 0),
    ("Simplify $\\sqrt{50}+\\sqrt{18}$.", "8\\sqrt2", "8\\sqrt2", 1),
    ("Simplify $(2x^3)^2$.", "4x^3x^3", "4x^6", 0),
    ("Simplify $a^2\\cdot a^3$", "a\\cdot a^4", "a^5", 0),
    *(
        (question, found, known, int(right))
        for question, found, known, right in (
            line.split(" ~ ")
            for line in r"""
Write 0.16 as a common fraction in lowest terms. ~ 0.16 ~ \frac{4}{25} ~ 0
Express $\frac{9}{40}$ as a decimal. ~ \frac{9}{40} ~ 0.225 ~ 0
Express $\frac{9}{40}$ as a percent. ~ \frac{9}{40} ~ 22.5\% ~ 0
Convert 18% to a decimal. ~ 18\% ~ 0.18 ~ 0
Convert $5\frac27$ to an improper fraction. ~ 5\frac27 ~ \frac{37}{7} ~ 0
Write 0.00052 in scientific notation. ~ 0.00052 ~ 5.2\times10^{-4} ~ 0
Express $8.1\times10^5$ as an integer. ~ 8.1\times10^5 ~ 810000 ~ 0
Express 125 as a power of 5. ~ 125 ~ 5^3 ~ 0
Find the prime factorization of 84. ~ 84 ~ 2^2\cdot3\cdot7 ~ 0
Find the value. ~ \frac{n^2+n}{n} ~ n+1 ~ 0
Write 0.5 as a fraction ~ 0.50 ~ \frac12 ~ 0
Write 0.5 as a fraction ~ 5\times10^{-1} ~ \frac12 ~ 0
Write 0.5 as a fraction ~ x=0.5 ~ \frac12 ~ 0
Write 0.5 as a fraction ~ \text{0.5} ~ \frac12 ~ 0
What fraction is equal to 0.5? ~ 0.5 ~ \frac12 ~ 0
Find the fraction equivalent to 0.35 in lowest terms. ~ 0.35 ~ \frac{7}{20} ~ 0
Which decimal is equivalent to $\frac{3}{8}$? ~ \frac38 ~ 0.375 ~ 0
What is the decimal form of $\frac{3}{8}$? ~ \frac38 ~ 0.375 ~ 0
Express $\tfrac{3}{8}$ in decimal form. ~ 3/8 ~ 0.375 ~ 0
Convert $\frac38$ to decimal. ~ \frac38 ~ 0.375 ~ 0
Find the percent equivalent to $\frac{1}{8}$. ~ \frac18 ~ 12.5\% ~ 0
Write $1.2\times10^3$ without exponents ~ 1.2\times10^3 ~ 1200 ~ 0
Write $1.2\times10^3$ as an integer ~ 1.2\times 10^{3} ~ 1200 ~ 0
Write 1200 in scientific notation ~ 1200 ~ 1.2\times10^3 ~ 0
Write one thousand, i.e. 1000, as a power of ten ~ 1000 ~ 10^3 ~ 0
Write the mixed number $2\frac13$ as an improper fraction ~ 2\frac13 ~ \frac73 ~ 0
Write $\frac73$ as a mixed number ~ \frac73 ~ 2\frac13 ~ 0
Write $\sqrt[3]{x}$ with a rational exponent. ~ \sqrt[3]{x} ~ x^{1/3} ~ 0
Write $x^{1/2}$ in radical form. ~ x^{1/2} ~ \sqrt{x} ~ 0
Write $x^{-2}$ with positive exponents. ~ x^{-2} ~ \frac{1}{x^2} ~ 0
Write $[3,\infty)$ as an inequality. ~ [3,\infty) ~ x\ge3 ~ 0
Write $50\%$ as a fraction ~ 50\% ~ \frac12 ~ 0
Write $50\%$ as a fraction ~ 0.5 ~ \frac12 ~ 0
Express 1/4 as a percentage. ~ 1/4 ~ 25\% ~ 0
Express 1/4 as a percentage. ~ 0.25 ~ 25\% ~ 0
Change 3/4 into a decimal ~ 3/4 ~ 0.75 ~ 0
Compute ~ \sqrt2\sqrt3 ~ \sqrt6 ~ 0
Compute ~ \sqrt2\cdot\sqrt3 ~ \sqrt6 ~ 0
Compute ~ e^2e^3 ~ e^5 ~ 0
Compute ~ |b-a|+0\cdot a ~ |a-b| ~ 0
Express $\frac{5}{16}$ as a decimal. ~ \frac{5}{16} ~ 0.3125 ~ 0
Convert 3.75 into a mixed number. ~ 3.75 ~ 3\frac34 ~ 0
Write 62% as a fraction in lowest terms. ~ 62\% ~ \frac{31}{50} ~ 0
Write 45000 using scientific notation, i.e. in scientific notation. ~ 45{,}000 ~ 4.5\times10^4 ~ 0
Express 64 as a power of 4. ~ 64 ~ 4^3 ~ 0
What is the prime factorization of $90$? ~ 90 ~ 2\cdot3^2\cdot5 ~ 0
What is 2 million plus 300 thousand? ~ 2.3\text{ million} ~ 2300000 ~ 1
Write 0.5 as a common fraction. ~ 0.5 ~ \frac12 ~ 0
Write 0.5 as a common fraction. ~ .5 ~ \frac12 ~ 0
Write 0.5 as a common fraction. ~ 50\% ~ \frac12 ~ 0
Write $0.\overline{36}$ as a fraction in lowest terms. ~ 0.\overline{36} ~ \frac{4}{11} ~ 0
Express $\frac{3}{8}$ as a decimal. ~ \frac38 ~ 0.375 ~ 0
Express $\frac{3}{8}$ as a decimal. ~ 3/8 ~ 0.375 ~ 0
Write 45% as a decimal. ~ 45\% ~ 0.45 ~ 0
Convert 0.07 to a percent. ~ 0.07 ~ 7\% ~ 0
What is 3/5 as a percentage? ~ \frac35 ~ 60\% ~ 0
Write $3\frac{1}{4}$ as an improper fraction. ~ 3\frac14 ~ \frac{13}{4} ~ 0
Write $\frac{13}{4}$ as a mixed number. ~ \frac{13}{4} ~ 3\frac14 ~ 0
Write 34500 in scientific notation. ~ 34500 ~ 3.45\times 10^4 ~ 0
Write $3.45 \times 10^4$ in standard form. ~ 3.45\times10^4 ~ 34500 ~ 0
Write 1000 as a power of 10. ~ 1000 ~ 10^3 ~ 0
Find the prime factorization of 60. ~ 60 ~ 2^2\cdot3\cdot5 ~ 0
Write 32 as a power of 2. ~ 32 ~ 2^5 ~ 0
Convert $101_2$ to base 10. ~ 5_{10} ~ 5 ~ 1
What is $10^2 \cdot 10$? ~ 10^3 ~ 1000 ~ 1
Find the inverse. ~ \frac12\begin{pmatrix}1&0\\0&3\end{pmatrix} ~ \begin{pmatrix}1/2&0\\0&3/2\end{pmatrix} ~ 1
How many dollars is 5 million times 3? ~ 15 \text{ million} ~ 15000000 ~ 1
Write $\frac{7}{20}$ as a percent. ~ \frac{7}{20} ~ 35\% ~ 0
Express 0.125 as a fraction in simplest form. ~ 0.125 ~ \frac18 ~ 0
Rewrite 2.5 as an improper fraction. ~ 2.5 ~ \frac52 ~ 0
Change $\frac{11}{4}$ to a mixed number. ~ \frac{11}{4} ~ 2\frac34 ~ 0
Express 0.00034 in scientific notation. ~ 0.00034 ~ 3.4\times10^{-4} ~ 0
Write $6\times10^3$ as an ordinary number. ~ 6\times10^3 ~ 6000 ~ 0
Express 10000 as a power of ten. ~ 10000 ~ 10^4 ~ 0
Express 81 as a power of 3. ~ 81 ~ 3^4 ~ 0
Write 72 as a product of prime factors. ~ 72 ~ 2^3\cdot3^2 ~ 0
What is half of $10^4$ times 20? ~ 10^5 ~ 100000 ~ 1
Solve $x^2-2x-1=0$. ~ \frac{2\pm\sqrt8}{2} ~ 1\pm\sqrt2 ~ 0
Solve $x^2-2x-1=0$. ~ \frac{2\pm2\sqrt2}{2} ~ 1\pm\sqrt2 ~ 0
Solve $16x^2-24x-3=0$. ~ \frac{6\pm4\sqrt3}{8} ~ \frac{3\pm2\sqrt3}{4} ~ 0
Solve $x^2-2x-4=0$. ~ 1\pm\sqrt5 ~ 1\pm\sqrt5 ~ 1
Arrange A, B and C from the least to the greatest. ~ C, B, A ~ A, B, C ~ 0
In order to find the roots of $f$, which of these are needed? ~ C, A ~ A, C ~ 1
Write five million in digits. ~ \text{five million} ~ 5000000 ~ 0
Write five million in digits. ~ 5\text{ million} ~ 5000000 ~ 0
How many words are there in five million pages? ~ \text{ten million} ~ 10000000 ~ 1
Solve $|x|<2$. ~ |x|<2 ~ (-2,2) ~ 0
Solve $x^2<4$. ~ |x|<2 ~ (-2,2) ~ 1
How many cents are \$0.75? ~ \$0.75 ~ 75\text{ cents} ~ 0
Write 150 minutes in hours and minutes. ~ 150\text{ minutes} ~ 2\text{ hours }30\text{ minutes} ~ 0
How long does it take? ~ 1\text{ hour }90\text{ minutes} ~ 2\text{ hours }30\text{ minutes} ~ 0
How many seconds are there in an hour? ~ 1\text{ hour} ~ 3600\text{ seconds} ~ 0
How many minutes are there in two and a half hours? ~ 2.5\text{ hours} ~ 150\text{ minutes} ~ 0
What is the price in dollars? ~ 75\text{ cents} ~ \$0.75 ~ 0
How many minutes is the film long? ~ 2\text{ hours }30\text{ minutes} ~ 150\text{ minutes} ~ 1
What does it cost? ~ 75\text{ cents} ~ \$0.75 ~ 1
How long is the film? ~ 150\text{ minutes} ~ 2\text{ hours }30\text{ minutes} ~ 1
Write $n=4k+1$, where $k$ is an integer, as a congruence. ~ n=4k+1 ~ n\equiv1\pmod4 ~ 0
Given $k$, find $n$. ~ n\text{ is a perfect square} ~ n=k^2 ~ 0
Find $n$. ~ n\equiv2+3\pmod7 ~ n\equiv5\pmod7 ~ 0
List the names in alphabetical order. ~ \text{Carol and Alice} ~ \text{Alice and Carol} ~ 0
What is $C(9,4)$? ~ C(9,4) ~ 126 ~ 0
""".strip().splitlines()
        )
    ),
]
"""Question, answer, known answer and score."""
